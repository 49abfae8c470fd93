"""Mixtures of guides: density, moments, quantiles and draws of known mixtures."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.elbo import TemperedTrace_ELBO
from pyro_bdl.guides import AutoEnsemble, AutoLaplaceGGN, AutoMAP, AutoMeanField, MixtureGuide
from pyro_bdl.guides.family import empirical_quantiles

MEANS, SCALES, WEIGHTS = [-1.0, 0.5, 2.0], [0.3, 1.0, 0.5], [0.2, 0.5, 0.3]
X, Y = torch.linspace(-1, 1, 6)[:, None], torch.zeros(6)


def program(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))
    s = pyro.sample("s", dist.LogNormal(torch.zeros((), dtype=torch.float64), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w.sum(), s), obs=y)


def normals(means=MEANS, scales=SCALES, model=program):
    """Mean-field guides with all numbers alike."""
    guides = []
    for mean, scale in zip(means, scales, strict=True):
        guide = AutoMeanField(model).prototype(X, Y)
        with torch.no_grad():
            guide.loc.fill_(mean)
            guide.scale = torch.full_like(guide.loc, scale)
        guides.append(guide)
    return guides


def reference(weights):
    """The mixture that each number has on its own."""
    means, scales, weights = (_double(values) for values in (MEANS, SCALES, weights))
    return torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(weights), torch.distributions.Normal(means, scales)
    )


def _double(values):
    return torch.tensor(values, dtype=torch.float64)


def test_moments_and_density():
    """q = sum_k weight_k q_k; variance sum_k weight_k (v_k + (m_k - m)^2), the law of total
    variance."""
    mixture, expected = MixtureGuide(normals(), [2.0, 5.0, 3.0]), reference(WEIGHTS)
    torch.testing.assert_close(mixture.location(), expected.mean.expand(3))
    torch.testing.assert_close(mixture.variances(), expected.variance.expand(3))
    joint = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(_double(WEIGHTS)),
        torch.distributions.Independent(
            torch.distributions.Normal(
                _double(MEANS)[:, None].expand(3, 3), _double(SCALES)[:, None].expand(3, 3)
            ),
            1,
        ),
    )
    for vector in mixture.sample_vectors(4):
        log_det = mixture.layout.constrain(vector)[1]
        found = mixture.log_density(vector, log_det)
        torch.testing.assert_close(found, joint.log_prob(vector) - log_det)


def test_quantiles_invert_the_distribution_function():
    mixture, expected = MixtureGuide(normals(), WEIGHTS), reference(WEIGHTS)
    levels = _double([1e-6, 0.05, 0.3, 0.5, 0.9, 1 - 1e-6])
    found = mixture.vector_quantiles(levels)
    assert found.shape == (6, 3)
    torch.testing.assert_close(expected.cdf(found[:, 0]), levels, rtol=1e-9, atol=1e-14)
    ends = mixture.vector_quantiles(torch.tensor([0.0, 1.0]).double())
    assert torch.equal(ends[0], torch.full_like(ends[0], -math.inf))
    assert torch.equal(ends[1], torch.full_like(ends[1], math.inf))
    median = mixture.median()
    torch.testing.assert_close(median["s"], found[3, 0].exp())
    assert (median["w"] - mixture.location()[:2]).abs().min() > 0.01  # no longer the mean


def test_quantiles_of_points_and_normals():
    """Half of the mass at 1, the other half standard normal."""
    (normal,) = normals([0.0], [1.0])
    point = AutoMAP(program).prototype(X, Y)
    point.loc.data.fill_(1.0)
    mixture = MixtureGuide([normal, point])
    cdf = 0.5 * torch.special.ndtr(torch.tensor(1.0).double())
    levels = torch.stack([cdf - 0.1, cdf + 0.01, cdf + 0.49, cdf + 0.51])
    below, at, still, above = mixture.vector_quantiles(levels)[:, 0]
    torch.testing.assert_close(torch.special.ndtr(below), 2 * (cdf - 0.1))
    torch.testing.assert_close(at, torch.ones_like(at))
    torch.testing.assert_close(still, torch.ones_like(at))
    torch.testing.assert_close(torch.special.ndtr(above), 2 * (cdf + 0.51) - 1)


def test_quantiles_of_other_members_are_those_of_draws():
    mixture = MixtureGuide([MixtureGuide(normals()), *normals()])
    levels = torch.tensor([0.2, 0.5, 0.8]).double()
    expected = MixtureGuide(normals()).vector_quantiles(levels)
    found = mixture.vector_quantiles(levels)
    # sd of a quantile: sqrt(p (1 - p) / draws) / density, the density being above 0.1 here
    assert (found - expected).abs().max() < 4.5 * 0.5 / 4096**0.5 / 0.1


def test_empirical_quantiles_in_parts():
    draws = torch.randn(7, 10)
    levels = torch.tensor([0.1, 0.5])
    expected = torch.quantile(draws, levels, dim=0)
    found = empirical_quantiles(draws, levels, numbers_at_once=40)
    torch.testing.assert_close(found, expected)


# Draws


def _counts(mixture, number):
    points = mixture.sample_vectors(number)[:, 0]
    return [int((points == mean).sum()) for mean in MEANS], points


def test_draws_are_stratified():
    guides = [AutoMAP(program).prototype(X, Y) for _ in MEANS]
    for guide, mean in zip(guides, MEANS, strict=True):
        guide.loc.data.fill_(mean)
    for _ in range(5):
        counts, points = _counts(MixtureGuide(guides), 12)
        assert counts == [4, 4, 4]
        assert points.tolist() != sorted(points.tolist())  # in random order
        counts, _ = _counts(MixtureGuide(guides, WEIGHTS), 20)
        assert counts == [4, 10, 6]
    counts, _ = _counts(MixtureGuide(guides, [0.0, 1.0, 0.0]), 9)
    assert counts == [0, 9, 0]
    singles = [_counts(MixtureGuide(guides, WEIGHTS), 1)[0] for _ in range(500)]
    share = torch.tensor(singles).double().mean(0)
    assert (share - torch.tensor(WEIGHTS)).abs().max() < 4.5 * 0.5 / 500**0.5


# As a guide


def test_it_is_a_guide():
    mixture = MixtureGuide(normals())
    assert {id(p) for p in mixture.parameters()} == {
        id(p) for member in mixture.members for p in member.parameters()
    }
    svi = pyro.infer.SVI(program, mixture, pyro.optim.Adam({"lr": 0.05}), TemperedTrace_ELBO())
    before = [p.detach().clone() for p in mixture.parameters()]
    for _ in range(3):
        assert math.isfinite(svi.step(X, Y.double()))
    assert all(not torch.equal(a, b) for a, b in zip(before, mixture.parameters(), strict=True))
    assert math.isfinite(pyro.infer.Trace_ELBO().loss(program, mixture, X, Y.double()))


def test_parameters_that_count_as_constants():
    mixture = MixtureGuide(normals())
    vector = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    with mixture.constant():
        mixture.log_density(vector, vector.new_zeros(())).backward()
    assert vector.grad is not None
    assert all(parameter.grad is None for parameter in mixture.parameters())
    mixture.log_density(vector, vector.new_zeros(())).backward()
    assert all(parameter.grad is not None for parameter in mixture.parameters())


def test_an_exact_mixture_of_one_is_its_member(conjugate):
    """The ELBO of the exact posterior is the log evidence, at every draw."""
    guide = AutoLaplaceGGN(conjugate.model, structure="full").prototype(conjugate.x, conjugate.y)
    guide.loc.data.copy_(conjugate.mean())
    exact = guide.laplace_approximation((conjugate.x, conjugate.y))
    mixture = MixtureGuide([exact, exact], [0.3, 0.7])
    elbo = TemperedTrace_ELBO(num_particles=3)
    evidence = bdl.evidence.log_marginal_likelihood(exact).item()
    assert -elbo.loss(conjugate.model, mixture, conjugate.x, conjugate.y) == pytest.approx(evidence)
    torch.testing.assert_close(mixture.variances(), exact.variances())


# Of Laplace approximations


def line(num_data=12):
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, num_data, dtype=torch.float64)[:, None]
    y = x[:, 0].sin() + 0.1 * torch.randn(num_data, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    return bdl.models.Regression(bdl.bayesianize(net), noise=0.1, num_data=num_data), x, y


@pytest.fixture(scope="module")
def ensemble(minimize):
    model, x, y = line()
    guide = AutoEnsemble(model, size=3).prototype(x, y)
    elbo = TemperedTrace_ELBO(num_particles=3)
    minimize(guide.parameters(), lambda: elbo.differentiable_loss(model, guide, x, y))
    return guide, model, x, y


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_laplace_around_every_member(ensemble, structure):
    """Mixtures of Laplace approximations (Eschenhagen et al. 2021)."""
    guide, model, x, y = ensemble
    batches = [(x[:6], y[:6]), (x[6:], y[6:])]
    mixture = guide.laplace_approximation(batches, structure=structure)
    assert len(mixture.members) == 3 and mixture.has_density
    for k, member in enumerate(mixture.members):
        alone = AutoLaplaceGGN(model, structure=structure).prototype(x, y)
        alone.loc.data.copy_(guide.locs[k])
        expected = alone.laplace_approximation((x, y))
        assert torch.equal(member.location(), guide.locs[k].detach())
        torch.testing.assert_close(member.variances(), expected.variances())
    torch.testing.assert_close(mixture.location(), guide.locs.detach().mean(0))
    levels = torch.tensor([0.25]).double()
    quantile = mixture.vector_quantiles(levels)
    mass = torch.stack(
        [
            torch.distributions.Normal(m.location(), m.variances().sqrt()).cdf(quantile)
            for m in mixture.members
        ]
    ).mean(0)
    torch.testing.assert_close(mass, torch.full_like(mass, 0.25))


# Refusals


def test_no_density_where_a_member_is_a_point(ensemble):
    guide, _, x, y = ensemble
    point = AutoMAP(program).prototype(X, Y)
    mixture = MixtureGuide([*normals(), point])
    assert not mixture.has_density
    vector = mixture.sample_vectors(1)[0]
    with pytest.raises(ValueError, match=r"its member 3 \(AutoMAP\) is a point"):
        mixture.log_density(vector, vector.new_zeros(()))
    partial = guide.laplace_approximation((x, y), structure="full", subset="last-layer")
    vector = partial.sample_vectors(1)[0]
    with pytest.raises(ValueError, match=r"its member 0 \(LaplaceGuide\) is a point"):
        partial.log_density(vector, vector.new_zeros(()))


def test_members_that_do_not_fit():
    def other(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(5), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=y[0])

    with pytest.raises(ValueError, match=r"member 3 .* \(site '[sw]'\)"):
        MixtureGuide([*normals(), AutoMAP(other).prototype(X, Y)])

"""Importance ratios of guides whose distance from the posterior is known."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.guides import AutoLaplaceGGN, AutoMAP, AutoMeanField
from pyro_bdl.importance import function_khat, ratios, summary_of

Y = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64)
PRECISION = 1 + len(Y)


def level(y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
    s = pyro.sample("s", dist.LogNormal(torch.zeros((), dtype=torch.float64), 0.5))
    with pyro.plate("data", 3):
        pyro.sample("y", dist.Normal(w, 1.0), obs=y)
    return s


def _guide(factor=1.0):
    """The exact posterior, its sd of w times a factor."""
    guide = AutoMeanField(level).prototype(Y)
    sd = torch.tensor([PRECISION**-0.5, 0.5], dtype=torch.float64)
    sd[0] *= factor
    with torch.no_grad():
        guide.loc.copy_(torch.tensor([float(Y.sum()) / PRECISION, 0.0]))
    guide.scale = sd
    return guide


def _log_evidence():
    covariance = torch.eye(3, dtype=torch.float64) + 1.0
    return dist.MultivariateNormal(torch.zeros(3, dtype=torch.float64), covariance).log_prob(Y)


def test_the_exact_posterior_has_constant_ratios():
    found = ratios(level, _guide(), Y, num_samples=200)
    assert found.log_ratios.shape == (200,)
    exact = _log_evidence().item()
    torch.testing.assert_close(found.log_ratios, torch.full((200,), exact).double())
    assert found.elbo == pytest.approx(exact)
    assert found.log_evidence == pytest.approx(exact)
    assert found.gap == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("ratios", "k", "said"),
    [
        (torch.zeros(200), math.nan, "no k-hat (all ratios are equal)"),
        (1e5 * torch.arange(200.0), math.inf, "k-hat inf (hopeless; limit 0.57)"),
        (
            torch.randn(200).index_fill(0, torch.tensor([3]), math.nan),
            math.inf,
            "no k-hat (1 of 200 ratios are NaN)",
        ),
    ],
)
def test_ratios_without_a_tail_to_fit(ratios, k, said):
    found = summary_of(ratios)
    assert found.pareto_k == pytest.approx(k, nan_ok=True)
    assert str(found).startswith(said)


def test_a_draw_without_density_adds_nothing_to_the_evidence():
    some = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = summary_of(torch.cat([some, torch.tensor([-math.inf], dtype=torch.float64)]))
    assert found.log_evidence == pytest.approx(summary_of(some).log_evidence - math.log(201 / 200))
    assert found.elbo == -math.inf


def test_the_error_of_the_log_evidence_is_its_spread():
    """Over sets of draws of a guide that is 1.3 times too wide, whose weights are bounded."""
    found = [ratios(level, _guide(1.3), Y, num_samples=100, seed=seed) for seed in range(300)]
    values = torch.tensor([one.log_evidence for one in found])
    mean_square = torch.tensor([one.log_evidence_error for one in found]).square().mean()
    assert mean_square.sqrt().item() == pytest.approx(values.std().item(), rel=0.15)
    assert values.mean().item() == pytest.approx(_log_evidence().item(), abs=0.01)
    assert f"log evidence {found[0].log_evidence:.2f} ± 0.0" in str(found[0])
    narrow = ratios(level, _guide(0.1), Y)
    assert "too high" in str(narrow) and "(too low, as a rule)" in str(narrow)


@pytest.mark.parametrize("factor", [1.5, 0.8])
def test_the_gap_is_the_divergence(factor):
    """log p(y) - ELBO = KL(q || p(w | y))."""
    found = ratios(level, _guide(factor), Y, num_samples=20_000)
    divergence = 0.5 * (factor**2 - 1) - math.log(factor)
    assert found.gap == pytest.approx(divergence, abs=4 * found.elbo_error + 0.02)
    assert found.elbo == pytest.approx(
        _log_evidence().item() - divergence, abs=5 * found.elbo_error
    )
    assert found.log_evidence == pytest.approx(_log_evidence().item(), abs=0.03)


def test_the_errors_of_evidence_and_gap_are_their_spread():
    """Log ratios a - z^2 / 5 of 1000 draws, over 300 repetitions: the mean ratio is known."""
    torch.manual_seed(0)
    truth = -0.5 * math.log(1.4)  # E exp(-z^2 / 5)
    beyond, errors = {"log_evidence": 0, "gap": 0}, []
    for _ in range(300):
        found = summary_of(3.0 - torch.randn(1000).double().square() / 5)
        for key, true in (("log_evidence", 3.0 + truth), ("gap", truth + 0.2)):
            off = abs(getattr(found, key) - true)
            beyond[key] += off > 2 * getattr(found, f"{key}_error")
        errors.append((found.log_evidence, found.log_evidence_error))
    values, said = torch.tensor(errors).unbind(1)
    assert max(beyond.values()) <= 300 * 0.08
    assert said.mean() == pytest.approx(float(values.std()), rel=0.15)
    assert f"{found.gap:.2f} ± {found.gap_error:.2f} nats" in str(found)


@pytest.mark.parametrize("factor", [0.4, 0.6])
def test_khat_is_that_of_two_normals(factor):
    """For q with r times the sd, p / q has the tail exp(z^2 (1 - r^2) / 2): k = 1 - r^2. See Yao et
    al. 2018, section 3.1, for k-hat of a guide."""
    found = ratios(level, _guide(factor), Y, num_samples=50_000)
    assert found.pareto_k == pytest.approx(1 - factor**2, abs=0.15)
    assert "k-hat" in str(found)
    assert ratios(level, _guide(1.5), Y).pareto_k < 0


def test_khat_in_function_space():
    """1 - r^2, also of a skewed law, as of probabilities near 0, and with another mean."""
    torch.manual_seed(0)
    reference = torch.randn(500, 4).exp()
    factor = torch.tensor([1.0, 0.3, 0.0, 5.0])
    found = function_khat(reference * factor + 1.0, reference)
    assert found.shape == (4,) and found.dtype == torch.float64
    assert found[[0, 1, 3]].tolist() == pytest.approx([0.0, 0.91, -24.0], abs=1e-4)
    assert found[2] == torch.inf
    assert function_khat(reference, torch.ones(2, 4)).isnan().all()


def test_a_network():
    torch.manual_seed(0)
    x, y = torch.randn(30, 2), torch.randn(30)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))
    model = bdl.models.Regression(bdl.bayesianize(net), noise=dist.HalfNormal(1.0))
    guide = AutoMeanField(model).prototype(x, y)
    found = ratios(model, guide, x, y, num_samples=100)
    elbo = bdl.training.estimate_elbo(model, guide, x, y, num_particles=2048)
    assert found.elbo == pytest.approx(elbo, abs=6 * found.elbo_error)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: ratios(level, _guide(), Y, num_samples=3), "at least 25 draws, got 3"),
        (lambda: ratios(level, AutoMAP(level).prototype(Y), Y), "AutoMAP has no density over all"),
        (lambda: ratios(level, {}, Y), "need a guide, whose density is known, got dict"),
        (lambda: function_khat(torch.randn(30, 2), torch.randn(30, 3)), "of the same function"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_laplace_of_the_exact_posterior_has_no_gap():
    guide = _guide()
    map_guide = AutoLaplaceGGN(level, structure="full").prototype(Y)
    with torch.no_grad():
        map_guide.loc.copy_(guide.loc)
    laplace = map_guide.laplace_approximation((Y,))
    assert ratios(level, laplace, Y).gap == pytest.approx(0.0, abs=1e-6)


def test_a_latent_for_each_datum_needs_all_data():
    def local(y=None):
        with pyro.plate("data", 6, subsample_size=3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    y = torch.randn(3)
    guide = AutoMeanField(local, create_plates=lambda y: pyro.plate("data", 6, subsample_size=3))
    guide.prototype(y)
    with pytest.raises(ValueError, match="latent site 'z' is in a subsampled plate"):
        ratios(local, guide, y)


def test_ratios_need_all_data():
    """The likelihood of some rows, scaled up, is none, and has no evidence."""

    def rows(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x), subsample_size=2) as index:
            pyro.sample("y", dist.Normal(w * x[index], 1.0), obs=y[index])

    data = torch.randn(2, 6)
    for make in (AutoMeanField, AutoNormal):
        guide = make(rows)
        guide(*data)
        with pytest.raises(ValueError, match=r"needs all data .*the plate 'data' has size 6 but"):
            ratios(rows, guide, *data)

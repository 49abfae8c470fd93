"""Subnetworks: all indices is full Laplace, NUTS and VI on a conjugate part."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.conjugate import Conjugate, with_ones
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import Program
from pyro_bdl.guides import selectors
from pyro_bdl.mcmc.starts import Restriction

NOISE, SCALE = 0.4, 0.8


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64) + 0.3
    return x, y + NOISE * torch.randn(30, generator=generator, dtype=torch.float64)


def linear(data):
    """Linear regression, its guide at the exact mode, its design and exact precision."""
    x, y = data
    net = nn.Linear(3, 1).double()
    model = bdl.models.Regression(bdl.bayesianize(net, bdl.priors.Normal(SCALE)), noise=NOISE)
    exact = Conjugate(with_ones(x), y, NOISE, SCALE)
    return model, exact.mean, exact.precision


def at_mode(model, mean, data, **options):
    guide = bdl.guides.AutoSubnetwork(model, **options).prototype(*data)
    guide.loc.data.copy_(mean)
    return guide


def test_all_indices_is_full_laplace(data):
    """Source: Daxberger et al. 2021."""
    model, mean, precision = linear(data)
    guide = at_mode(model, mean, data, select=selectors.LargestMagnitude(), size=1.0)
    posterior = guide.laplace_approximation(data)
    torch.testing.assert_close(posterior.precision.logdet(), precision.logdet())
    torch.testing.assert_close(posterior.variances(), torch.linalg.inv(precision).diagonal())


def test_a_part_has_the_precision_given_the_others(data):
    """The conditional precision is a block of the joint one (Bishop 2006, equation 2.73)."""
    model, mean, precision = linear(data)
    guide = at_mode(model, mean, data, select=selectors.Random(3), size=2)
    chosen = guide.choose(data)
    posterior = guide.laplace_approximation(data)
    part = precision[chosen][:, chosen]
    torch.testing.assert_close(posterior.variances()[chosen], torch.linalg.inv(part).diagonal())
    others = torch.ones(4, dtype=torch.bool)
    others[chosen] = False
    assert (posterior.variances()[others] == 0).all()
    assert (posterior.sample_vectors(3)[:, others] == mean[others]).all()


def test_variational_finds_the_covariance_of_the_part(data, exact_expectations, minimize):
    model, mean, precision = linear(data)
    guide = at_mode(model, mean, data, select=selectors.Random(3), size=2)
    normal = guide.variational(data, init_scale=0.1)
    elbo = bdl.elbo.TemperedTrace_ELBO(num_particles=exact_expectations(2))
    minimize(
        normal.parameters(),
        lambda: elbo.differentiable_loss(model, normal, *data),
        tolerance_change=1e-12,
    )
    chosen = guide.choose(data)
    expected = torch.linalg.inv(precision[chosen][:, chosen])
    found = normal.scale_tril @ normal.scale_tril.T
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(normal.location(), mean, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(normal.variances()[chosen], found.diagonal())


def test_nuts_samples_the_part_and_holds_the_rest(data):
    model, mean, precision = linear(data)
    guide = at_mode(model, mean, data, select=selectors.Random(3), size=2)
    subset = guide.laplace_approximation(data)
    samples = bdl.mcmc.sample(
        model, *data, subset=subset, num_warmup=100, num_samples=250, num_chains=2, progress=False,
        seed=1,
    )  # fmt: skip
    flat = guide.layout.flatten(samples.flat())
    chosen = guide.choose(data)
    others = torch.ones(4, dtype=torch.bool)
    others[chosen] = False
    assert (flat[:, others] == mean[others]).all()
    expected = torch.linalg.inv(precision[chosen][:, chosen])
    variances = expected.diagonal()
    draws = 500 / 4  # as many independent ones at least
    error = (variances / draws).sqrt()
    assert ((flat[:, chosen].mean(0) - mean[chosen]).abs() < 5 * error).all()
    error = ((torch.outer(variances, variances) + expected.square()) / draws).sqrt()
    assert ((torch.cov(flat[:, chosen].T) - expected).abs() < 5 * error).all()


def test_chains_take_the_part_of_a_guide_of_the_same_program(data):
    model, mean, _ = linear(data)
    guide = at_mode(model, mean, data, size=2)
    with pytest.raises(TypeError, match="subset must be a guide over some weights"):
        bdl.mcmc.sample(model, *data, subset=guide)
    other = Program(lambda: pyro.sample("w", dist.Normal(torch.zeros(7), 1.0).to_event(1)))
    with pytest.raises(ValueError, match="of 4 numbers, and the program has 7"):
        Restriction(other, guide.laplace_approximation(data))


def test_bad_options(data):
    model, _, _ = linear(data)
    guide = bdl.guides.AutoSubnetwork(model, size=9)
    with pytest.raises(ValueError, match="from 1 to 4"):
        guide.choose(data)
    with pytest.raises(ValueError, match="init_scale"):
        bdl.guides.AutoSubnetwork(model, size=2).variational(data, init_scale=0.0)


def test_memory_is_checked_before_the_selector_works(data, monkeypatch):
    from pyro_bdl.curvature import config

    class Slow(selectors.Selector):
        def scores(self, trained):
            raise AssertionError("the selector was asked")

    model, mean, _ = linear(data)
    guide = at_mode(model, mean, data, select=Slow(), size=4)
    monkeypatch.setattr(config, "available_memory", lambda device: 8)
    with pytest.raises(MemoryError, match="GiB"):
        guide.laplace_approximation(data)


def test_another_selector_and_size_for_one_approximation(data):
    model, mean, _ = linear(data)
    guide = at_mode(model, mean, data, select=selectors.Random(3), size=2)
    own = guide.laplace_approximation(data).subset.indices
    largest = guide.laplace_approximation(data, select=selectors.LargestMagnitude(), size=1)
    assert largest.subset.indices.tolist() == [mean.abs().argmax()]
    assert torch.equal(guide.laplace_approximation(data).subset.indices, own)
    assert guide.variational(data, size=3).loc.shape == (3,)
    with pytest.raises(TypeError, match="selector"):
        guide.laplace_approximation(data, select="largest")


def test_the_default_leaves_out_what_has_no_effect(data):
    x, y = data
    x[:, 1] = 0.0
    model, mean, _ = linear((x, y))
    guide = at_mode(model, mean, (x, y), size=3)
    assert guide.choose((x, y)).tolist() == [0, 2, 3]


def test_without_a_size_a_tenth_of_the_weights_is_chosen(data):
    model, mean, _ = linear(data)
    guide = at_mode(model, mean, data)
    assert len(guide.choose(data)) == max(1, round(0.1 * len(mean)))

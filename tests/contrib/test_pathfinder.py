"""Pathfinder's Gaussian against dense BFGS, and on a posterior that is a Gaussian."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.conjugate import Conjugate

import pyro_bdl as bdl
from pyro_bdl.contrib.pathfinder import inverse_hessian
from pyro_bdl.curvature.structures.base import log_prob


def pairs(size=5, count=3):
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    hessian = root @ root.mT + torch.eye(size)
    steps = torch.randn(size, count, generator=generator, dtype=torch.float64)
    return torch.rand(size, generator=generator, dtype=torch.float64) + 0.5, steps, hessian @ steps


def dense(covariance):
    root = covariance.root_times(torch.eye(len(covariance.scale), dtype=torch.float64))
    return root.mT @ root


@pytest.mark.parametrize("size", [5, 9])
def test_the_compact_form_is_the_recursion_of_bfgs(size):
    """H <- (I - r s y') H (I - r y s') + r s s', r = 1 / s'y; also with more columns than rows."""
    alpha, steps, slopes = pairs(size)
    expected = torch.diag(alpha)
    for s, y in zip(steps.mT, slopes.mT, strict=True):
        left = torch.eye(size, dtype=torch.float64) - torch.outer(s, y) / (s @ y)
        expected = left @ expected @ left.mT + torch.outer(s, s) / (s @ y)
    found = inverse_hessian(alpha, steps, slopes)
    assert torch.allclose(dense(found), expected, atol=1e-10)
    assert torch.allclose(found.variances(), expected.diagonal())
    v = torch.arange(size, dtype=torch.float64)
    assert torch.allclose(found.times(v), expected @ v)
    normal = torch.distributions.MultivariateNormal(torch.zeros(size).double(), expected)
    assert torch.allclose(log_prob(found, v), normal.log_prob(v))


def linear(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=x.dtype), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    return x, x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def test_the_posterior_of_a_linear_model_and_its_khat():
    x, y = data()
    pyro.set_rng_seed(0)
    guide = bdl.guides.AutoPathfinder(linear, num_paths=2).prototype(x, y)
    exact = Conjugate(x, y, 0.5)
    assert torch.allclose(guide.location(), exact.mean, atol=0.02)
    slack = 0.3 * float(exact.covariance.diagonal().max())
    assert torch.allclose(guide.covariance(), exact.covariance, atol=slack)
    # the ELBO of each path is below the evidence
    assert guide.elbos.shape == (2,)
    assert (guide.elbos < exact.evidence + 0.5).all()
    assert bdl.importance.ratios(linear, guide, x, y, num_samples=400).pareto_k < 0.7
    draws = guide.sample_vectors(4000)
    assert torch.allclose(draws.T.cov(), guide.covariance(), atol=1.5e-3)


@pytest.mark.slow
def test_its_draws_start_chains_and_its_covariance_is_their_metric():
    x, y = data()
    pyro.set_rng_seed(0)
    guide = bdl.guides.AutoPathfinder(linear).prototype(x, y)
    samples = bdl.mcmc.sample(
        linear, x, y, init=guide, kernel=bdl.mcmc.NUTS(inverse_mass=guide.covariance()),
        num_warmup=20, num_samples=100, progress=False,
    )  # fmt: skip
    assert float(samples.stats["num_steps"].double().mean()) < 8  # nearly white in this metric


def test_refusals():
    with pytest.raises(ValueError, match="history must be at least 1"):
        bdl.guides.AutoPathfinder(linear, history=0)

    def unnormalizable(y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(w.sum() * float("nan"), 1.0, validate_args=False), obs=y)

    with pytest.raises(ValueError):
        bdl.guides.AutoPathfinder(unnormalizable).prototype(torch.tensor(0.0).double())

"""Tempered sequential Monte Carlo against evidences and posteriors in closed form."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.mcmc import tempered, tempered_smc

QUICK = {"num_samples": 400, "progress": False}


def linear(x, y=None):
    w = pyro.sample("w", dist.Normal(x.new_zeros(x.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 3, generator=generator, dtype=dtype)
    return x, x @ torch.tensor([1.0, -2.0, 0.5], dtype=dtype) + 0.3


@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_evidence_and_posterior_of_a_linear_regression_are_exact(exact_posterior, dtype):
    x, y = data(dtype)
    samples = tempered_smc(linear, x, y, **QUICK)
    covariance = x @ x.T + 0.25 * torch.eye(len(x), dtype=dtype)
    exact = dist.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)
    error = samples.info["log_evidence_error"]
    assert error < 0.1
    # Seven degrees of freedom; 99.9 % of a t are within 5.4
    assert abs(samples.info["log_evidence"] - float(exact)) < 5.4 * error
    assert len(samples.info["log_evidences"]) == samples.num_chains == 8
    mean, covariance = exact_posterior(x, y)
    w = samples.latents["w"]
    sd = covariance.diagonal().sqrt()
    assert ((w.mean((0, 1)) - mean).abs() < 0.1 * sd).all()
    assert (w.std((0, 1)) / sd - 1).abs().max() < 0.1
    assert w.dtype == dtype


def test_two_modes_far_apart_have_their_mass():
    """p(w) p(y | w) with |w| = 3: evidence by a sum over a grid, and the signs are a coin's."""

    def squared(y):
        w = pyro.sample("w", dist.Normal(torch.zeros(()).double(), 1.0))
        pyro.sample("y", dist.Normal(w + w**2, 0.1), obs=y)

    y = torch.tensor(6.0).double()
    samples = tempered_smc(squared, y, **QUICK)
    grid = torch.linspace(-8, 8, 200_001).double()
    joint = dist.Normal(0.0, 1.0).log_prob(grid) + dist.Normal(grid + grid**2, 0.1).log_prob(y)
    exact = joint.logsumexp(0) + math.log(16 / 200_000)
    error = samples.info["log_evidence_error"]
    assert abs(samples.info["log_evidence"] - float(exact)) < 5.4 * error
    share = joint.softmax(0)[grid < 0].sum()  # of the mode at -3: 0.07
    found = (samples.latents["w"] < 0).double().mean(1)
    assert abs(found.mean() - share) < 5.4 * found.std() / len(found) ** 0.5


def test_constrained_latents_have_the_evidence_of_their_density():
    """A LogNormal's number has its density in log s, with the log determinant."""

    def rate(y):
        s = pyro.sample("s", dist.LogNormal(torch.tensor(0.5).double(), 1.0))
        pyro.sample("y", dist.Normal(0.0, s), obs=y)

    y = torch.tensor(4.0).double()
    samples = tempered_smc(rate, y, **QUICK)
    grid = torch.linspace(-8, 8, 20_001).double()
    joint = dist.Normal(0.5, 1.0).log_prob(grid) + dist.Normal(0.0, grid.exp()).log_prob(y)
    exact = joint.logsumexp(0) + math.log(16 / 20_000)
    difference = samples.info["log_evidence"] - float(exact)
    assert abs(difference) < 5.4 * samples.info["log_evidence_error"] < 0.5
    assert (samples.latents["s"] > 0).all()


def test_the_next_temperature_leaves_the_share_of_effective_particles():
    terms = np.random.default_rng(0).normal(size=1000) * 50
    step = tempered._next(terms, 1.0, 0.5)
    weights = np.exp(step * (terms - terms.max()))
    assert weights.sum() ** 2 / (weights**2).sum() == pytest.approx(500, rel=1e-3)
    assert tempered._next(terms * 1e-4, 0.7, 0.5) == 0.7


def flat(y):
    w = pyro.sample("w", dist.Normal(torch.zeros(()), 1.0).mask(False))
    pyro.sample("y", dist.Normal(w, 1.0), obs=y)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: tempered_smc(flat, torch.zeros(())), UnsupportedProgramError, "'w' is improper"),
        (lambda: tempered_smc(linear, *data(), num_chains=1), ValueError, "num_chains"),
        (
            lambda: tempered_smc(linear, *data(), ess=1.0),
            ValueError,
            "ess must lie between",
        ),
    ],
)
def test_refusals(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_the_same_seed_gives_the_same_particles():
    options = {"num_samples": 20, "num_chains": 2, "moves": 1, "progress": False}
    x, y = data(torch.float32)
    one, other = (tempered_smc(linear, x, y, seed=3, **options) for _ in range(2))
    assert torch.equal(one.latents["w"], other.latents["w"])
    assert one.latents["w"].dtype == torch.float32
    assert bdl.Predictive(linear, one)(x)["y"].shape == (40, 20)

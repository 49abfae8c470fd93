"""Steps in a compiled loop of JAX are those of torch, up to their noise."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.conjugate import Conjugate
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.contrib.stochastic_gradient import PSGLD, SGNHT
from pyro_bdl.mcmc import SGHMC, SGLD
from pyro_bdl.mcmc.starts import Restriction
from pyro_bdl.mcmc.stochastic_gradient import walk
from pyro_bdl.mcmc.stochastic_gradient.jax_steps import CompiledSteps
from pyro_bdl.mcmc.stochastic_gradient.scores import Scores
from pyro_bdl.program import Program

KERNELS = {kind.name: kind(step_size=1e-3, temperature=0.7) for kind in (SGLD, SGHMC, SGNHT, PSGLD)}


def program():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
    model = bdl.models.Regression(bdl.bayesianize(net), noise=dist.HalfNormal(1.0))
    return Program(model, x, x[:, 0].sin())


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_steps_without_noise_are_those_of_torch(name, settled):
    target, kernel = program(), KERNELS[name]
    start = 0.1 * torch.randn(3, target.size, dtype=torch.float64)
    score = Scores(target.log_density, traced=False)
    state = kernel.update(kernel.init(start), score(start, ((), {}))[1], 1e-3, 0.0)
    start = state.position
    if settled:
        state = kernel.settle(state)
    steps = CompiledSteps(kernel, Restriction(target, None), start)
    limit = torch.full((3,), -1e9, dtype=torch.float64)
    options = {"size": 1e-3, "temperature": 0.0}
    gradient = score(start, ((), {}))[1]
    taken, ours, values, gradients = steps(state, gradient, limit, 60, **options)
    assert taken == 60
    for _ in range(60):
        state = kernel.update(state, gradient, 1e-3, 0.0)
        exact, gradient = score(state.position, ((), {}))
    torch.testing.assert_close(list(ours), list(state))
    torch.testing.assert_close((values, gradients), (exact, gradient))
    rising = exact + torch.tensor([1e3, -1e9, -1e9], dtype=torch.float64)  # one is below
    assert steps(state, gradient, rising, 60, **options)[0] == 1


def normal(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=list(KERNELS))
def test_draws_have_the_tempered_posterior(kernel, monkeypatch):
    """Mean and covariance within five Monte Carlo standard errors and the bias of the step."""
    monkeypatch.setattr(walk, "_WORTH_COMPILING", 0)
    x = torch.stack([torch.ones(12), torch.linspace(-1, 1, 12)], -1)
    y = x @ torch.tensor([0.5, -1.0]) + 0.1 * torch.cos(50 * x[:, 1])
    exact = Conjugate(x, y, 0.5)
    kernel = type(kernel)(step_size=1e-3, temperature=0.7, thinning=20)
    samples = bdl.mcmc.sgmcmc(
        normal, (x, y), kernel=kernel, num_chains=4, num_warmup=1000, num_samples=500,
        progress=False,
    )  # fmt: skip
    offset = samples.latents["w"] - exact.mean
    squares = offset[..., :, None] * offset[..., None, :]
    assert (offset.mean((0, 1)).abs() < 5 * bdl.diagnostics.mcse(offset)).all()
    slack = 5 * bdl.diagnostics.mcse(squares) + 0.05 * exact.covariance.max()
    assert ((squares.mean((0, 1)) - 0.7 * exact.covariance).abs() < slack).all()


class Branching(SGLD):
    """An update that reads values, and has no translation."""

    def update(self, state, gradient, step_size, temperature):
        return super().update(state, gradient.clamp(max=float(gradient.max())), step_size, 0.0)


def test_an_update_without_translation_is_run_in_torch():
    target, kernel = program(), Branching(step_size=1e-3)
    start = torch.zeros(2, target.size, dtype=torch.float64)
    steps = CompiledSteps(kernel, Restriction(target, None), start)
    options = {"size": 1e-3, "temperature": 1.0}
    assert steps(kernel.init(start), torch.ones_like(start), torch.zeros(2), 5, **options) is None


def test_a_run_that_dies_goes_on_bit_for_bit(monkeypatch, tmp_path):
    monkeypatch.setattr(walk, "_WORTH_COMPILING", 0)
    monkeypatch.setattr(walk, "_SECONDS_PER_WRITE", 0.0)
    x, y = torch.ones(12, 2), torch.linspace(-1, 1, 12)
    options = {"kernel": SGHMC(step_size=1e-3, thinning=7), "num_chains": 2, "num_warmup": 30}

    def run(folder):
        return bdl.mcmc.sgmcmc(
            normal, (x, y), num_samples=20, progress=False, checkpoint=folder, **options
        ).latents["w"]

    whole, keep = run(tmp_path / "whole"), walk.Walk._keep

    def dies(self, size):
        if self.kept == 11:
            raise RuntimeError("power failure")
        keep(self, size)

    monkeypatch.setattr(walk.Walk, "_keep", dies)
    with pytest.raises(RuntimeError, match="power failure"):
        run(tmp_path / "cut")
    monkeypatch.setattr(walk.Walk, "_keep", keep)
    assert torch.equal(run(tmp_path / "cut"), whole)

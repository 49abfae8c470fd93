"""Every kernel draws the numbers that it drew at the release, at the same seed."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import reference_draws

import pyro_bdl as bdl
from pyro_bdl.mcmc.kernels import KERNELS
from pyro_bdl.mcmc.stochastic_gradient.kernels import StochasticKernel

X = torch.linspace(-1, 1, 8, dtype=torch.float64)
QUICK = {"num_warmup": 4, "num_samples": 3, "seed": 1, "progress": False}


def level(x, y=None):
    w = pyro.sample("w", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
    s = pyro.sample("s", dist.LogNormal(x.new_zeros(()), 0.5))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w[0] + w[1] * x, s), obs=y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")  # of so few draws
@pytest.mark.parametrize("name", KERNELS)
def test_chains_draw_the_numbers_of_this_release(name):
    samples = bdl.mcmc.sample(level, X, X.square(), kernel=name, num_chains=1, **QUICK)
    draws = {site: value[0] for site, value in samples.latents.items()}
    reference_draws.check(name, draws, ("torch", "jax"))


@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")
@pytest.mark.parametrize("kind", StochasticKernel.__subclasses__(), ids=lambda kind: kind.name)
def test_minibatch_chains_draw_the_numbers_of_this_release(kind):
    kernel = kind(step_size=0.01)
    samples = bdl.mcmc.sgmcmc(level, (X, X.square()), kernel=kernel, num_chains=1, **QUICK)
    reference_draws.check(kind.name, {site: value[0] for site, value in samples.latents.items()})

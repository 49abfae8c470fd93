"""Warnings and errors of MCMC for programs, chains and processes that give no posterior."""

import itertools
import random
import warnings
from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_bdl import mcmc
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.mcmc.chains import Chains, warn_of_divergences, warn_of_stuck_chains
from pyro_bdl.mcmc.run import warn_of_another_device
from pyro_bdl.mcmc.starts import Restriction, starting_vectors
from pyro_bdl.program import Program

pytestmark = pytest.mark.filterwarnings("ignore:.*#divergences")  # chains of a few draws

FEW = {
    "kernel": mcmc.NUTS(max_tree_depth=2), "num_warmup": 2, "num_samples": 2, "progress": False,
}  # fmt: skip


def _program(number=lambda: 0.0):
    def model(y):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        s = pyro.sample("s", dist.HalfNormal(1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(w.sum() + number(), 0.1 + s), obs=y)

    return model


@pytest.mark.parametrize("number", [random.random, np.random.rand, itertools.count().__next__])
def test_numbers_that_are_no_latents_are_refused(number):
    with pytest.raises(UnsupportedProgramError, match=r"'y' is .* in one run and .* in another"):
        mcmc.sample(_program(number), torch.ones(3), backend="pyro", **FEW)


def _chains(step_size=0.1, num_steps=7, diverging=0, still=False, draws=20, **more):
    vectors = torch.randn(3, draws, 2)
    if still:
        vectors[1] = vectors[1, 0]
    sizes = torch.full((3, draws), 0.1)
    sizes[1] = step_size
    diverged = torch.zeros(3, draws, dtype=torch.bool)
    diverged.view(-1)[:diverging] = True
    steps = torch.full((3, draws), num_steps)
    stats = {"step_size": sizes, "num_steps": steps, "diverging": diverged}
    stats |= {name: torch.full((3, draws), value) for name, value in more.items()}
    return Chains(vectors, stats)


@pytest.mark.parametrize(
    ("warn", "options", "words"),
    [
        (warn_of_divergences, {"diverging": 60}, "60 of 60 draws ended in a divergence"),
        (warn_of_divergences, {"diverging": 1}, "1 of 60 draws .* LocScaleReparam.* smaller steps"),
        (warn_of_divergences, {"diverging": 0}, None),
        (warn_of_divergences, {"diverging": 6, "energy_variance": 1e-3}, None),
        (warn_of_divergences, {"diverging": 9, "energy_variance": 1e-3}, "9 of 60 .* energy_var"),
        (
            warn_of_stuck_chains,
            {"step_size": 1e-11, "num_steps": 1023},
            r"of 3 chains .* hardly moved .*: 1 \(step size 1.0e-11\)",
        ),
        (warn_of_stuck_chains, {"still": True}, r"hardly moved .*: 1 \(step size 1.0e-01\)"),
        (warn_of_stuck_chains, {"step_size": 1e-3}, None),
        (warn_of_stuck_chains, {"still": True, "draws": 3}, None),
    ],
)
def test_chains_that_diverge_or_hardly_move(warn, options, words):
    with warnings.catch_warnings() if words is None else pytest.warns(BdlWarning, match=words):
        if words is None:
            warnings.simplefilter("error")
        warn(_chains(**options))


def test_a_kernel_without_statistics_is_judged_by_its_draws():
    chains = replace(_chains(still=True), stats={})
    warn_of_divergences(chains)
    with pytest.warns(BdlWarning, match="hardly moved .*: 1; start elsewhere"):
        warn_of_stuck_chains(chains)


@pytest.mark.parametrize("backend", ["pyro", pytest.param("numpyro", marks=pytest.mark.slow)])
def test_a_chain_that_is_stuck_from_the_start(backend):
    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal((1e6 * w).exp(), 1e-6), obs=y)

    options = FEW | {"num_warmup": 5, "num_samples": 10, "init": {"w": torch.tensor(1e-5)}}
    with pytest.warns(BdlWarning, match="hardly moved"):
        mcmc.sample(model, torch.tensor(1.0), backend=backend, **options)


def test_uniform_starts():
    program = Program(_program(), torch.ones(3))
    starts = starting_vectors(Restriction(program, None), "uniform", 500)
    assert starts.shape == (500, 4)
    assert starts.min() >= -2.0 and starts.max() <= 2.0
    torch.testing.assert_close(starts.mean(0), torch.zeros(4), atol=0.2, rtol=0.0)
    torch.testing.assert_close(starts.var(0), torch.full((4,), 4.0 / 3.0), atol=0.2, rtol=0.0)


def test_an_accelerator_that_jax_lacks_is_said():
    with pytest.warns(BdlWarning, match=r"on 'cuda:0', but JAX is installed for the CPU only"):
        warn_of_another_device(torch.device("cuda:0"))

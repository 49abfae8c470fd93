"""``sample``: Markov chains on a Pyro program with all its data."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pyro_bdl.errors import warn
from pyro_bdl.guides.gaussian import LaplaceGuide
from pyro_bdl.guides.subnetwork import SubsetNormal
from pyro_bdl.mcmc.chains import (
    Chains,
    Plan,
    warn_of_divergences,
    warn_of_energy_variance,
    warn_of_stuck_chains,
)
from pyro_bdl.mcmc.kernels import MCLMC, Kernel, as_kernel
from pyro_bdl.mcmc.starts import Restriction, as_start, checked_program, starting_vectors
from pyro_bdl.program.samples import Samples
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.random_state import checked_seed, seeded
from pyro_bdl.utils.validation import as_path, one_of, whole_number


def _in_jax(target: Restriction, start: Tensor, kernel: Kernel, plan: Plan) -> Chains:
    from pyro_bdl.mcmc.run import run  # JAX is imported with the first chains

    return run(target, start, kernel, plan)


# Backend -> a function that runs chains of a target from starting vectors (chains, P).
BACKENDS: dict[str, Callable[[Restriction, Tensor, Kernel, Plan], Chains]] = {"numpyro": _in_jax}


def sample(
    model: Callable,
    *args: Any,
    kernel: str | Kernel = "nuts",
    num_warmup: int = 500,
    num_samples: int = 500,
    num_chains: int = 1,
    seed: int = 0,
    init: Any = None,
    backend: Literal["numpyro", "pyro"] = "numpyro",
    chain_method: Literal["parallel", "vectorized"] | None = None,
    checkpoint: str | Path | None = None,
    subset: LaplaceGuide | SubsetNormal | None = None,
    progress: bool | None = None,
) -> Samples:
    """Draw from the posterior of a Pyro program by Hamiltonian or microcanonical dynamics.

    The program runs in evaluation mode with all its data at once. ``backend="numpyro"`` traces its
    log density to ATen operators and evaluates them in JAX; ``backend="pyro"`` runs the program
    itself, for NUTS and HMC. For a program under ``handlers.temper`` the target is the tempered
    posterior. The same seed gives the same draws. Ctrl-C keeps the draws made so far.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> samples = bdl.mcmc.sample(model, x, y, num_warmup=50, num_samples=50, num_chains=2)
        >>> samples
        Samples(2 chains x 50 draws, sites: weight, bias)
        >>> samples.latents["weight"].shape
        torch.Size([2, 50, 1, 1])

    :param model: a Pyro program with continuous latents.
    :param args: the program's arguments, including the targets; keywords by ``functools.partial``.
    :param kernel: ``mcmc.NUTS(...)``, ``HMC``, ``MCLMC`` or ``MAMS``; "nuts", "hmc", "mclmc" and
        "mams" are these with their defaults.
    :param num_warmup: iterations per chain that adapt step size and metric, not kept.
    :param num_samples: draws per chain.
    :param num_chains: of one chain there is no R-hat; take 4 for a reference of ``compare``.
    :param init: where the chains start: "prior" (each at a draw of the prior, the default),
        "uniform" (unconstrained numbers between -2 and 2, as in NumPyro), "network" (the values of
        the networks' parameters), a guide or ``Samples`` (each at a draw of it; by default of
        ``subset``, if there is one), or a dict of latents.
    :param chain_method: "parallel" (in threads, on separate devices) or "vectorized" (in lockstep
        by ``vmap``, where each iteration takes as long as the slowest chain's); by default parallel
        on a CPU, and vectorized on an accelerator. The draws are the same up to rounding. Pyro's
        chains run one after another.
    :param checkpoint: a folder. Draws and state are written there every few seconds, and the same
        call goes on from what it finds there: killed at any moment, it ends with the same draws as
        an uninterrupted one. A larger ``num_samples`` adds draws.
    :param subset: a guide over some weights, as of ``AutoSubnetwork``: these are drawn, and the
        others stay at its location.
    :param progress: show a progress bar; by default in terminals and notebooks.
    :returns: draws in the latents' supports, on the program's device, with statistics;
        ``num_steps`` counts gradients. Of MCLMC, ``energy_variance`` is the one reached, averaged
        over the steps of a draw, and ``momentum_length`` the length L.
    :warns BdlWarning: if draws ended in a divergence, if chains hardly
        moved from their start, or if the energy variance of MCLMC is far from its target.
    :raises UnsupportedProgramError: for a program without observed sites, with discrete latents
        that cannot be summed out, or with latents that ``poutine.block`` hides.
    :raises MissingOperatorError: if an operator has no translation to JAX.
    :raises ValueError: for an argument outside its range, data that are not finite, targets outside
        their support, a plate that holds a part of its data, or a checkpoint of another run.
    """
    kernel = as_kernel(kernel)
    one_of(backend, "backend", BACKENDS)
    one_of(chain_method, "chain_method", (None, "parallel", "vectorized"))
    num_chains = whole_number(num_chains, "num_chains")
    plan = Plan(
        whole_number(num_warmup, "num_warmup", least=0),
        whole_number(num_samples, "num_samples"),
        checked_seed(seed),
        chain_method,
        None if checkpoint is None else as_path(checkpoint, "checkpoint"),
        progress,
    )
    started, init = time.perf_counter(), as_start(init, subset)
    with evaluation_mode(model, init), seeded(seed):
        program, usable = checked_program(model, args, {}, init)
        program.require_all_data("MCMC")
        restriction = Restriction(program, subset)
        restriction.require_memory(num_chains, plan.num_samples)
        start = starting_vectors(restriction, init, num_chains, usable=usable)
        kernel.check_size(start.shape[-1])
        described = restriction.described(start[0])
    with evaluation_mode(program.modules):
        chains = BACKENDS[backend](restriction, start, kernel, plan)
    info = {
        "kernel": kernel.name,
        "backend": kernel.library if backend == "numpyro" else backend,
        "num_warmup": plan.num_warmup,
        "seed": seed,
        "options": kernel.options(),
    }
    samples = _samples(restriction, kernel, chains, plan.num_samples, info, started)
    return replace(samples, program=described)


def _samples(
    restriction: Restriction,
    kernel: Kernel,
    chains: Chains,
    count: int,
    info: dict[str, Any],
    started: float,
) -> Samples:
    """The draws in their supports, with warnings of chains that say little of the posterior.

    :param count: the number of draws that each chain was to make.
    """
    if chains.interrupted:
        warn(
            f"interrupted: {chains.vectors.shape[1]} of {count} draws per chain were made",
            "interrupted",
        )
    warn_of_divergences(chains)
    warn_of_stuck_chains(chains)
    if isinstance(kernel, MCLMC):
        warn_of_energy_variance(chains, kernel.energy_variance, kernel.step_size is None)
    with torch.no_grad():
        latents = restriction.constrain(chains.vectors)
    seconds = time.perf_counter() - started

    def more(count: int) -> Samples:
        count, started = whole_number(count, "num_samples"), time.perf_counter()
        assert chains.resume is not None
        return _samples(restriction, kernel, chains.resume(count), count, info, started)

    return Samples(
        latents,
        chains.stats,
        {**info, "seconds": seconds, "interrupted": chains.interrupted},
        None if chains.resume is None else more,
    )

"""``sample``: HMC and NUTS on a Pyro program, by Pyro's or NumPyro's implementation."""

import random
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_bdl.errors import BdlWarning
from pyro_bdl.mcmc.chains import (
    Chains,
    Settings,
    Target,
    at_least,
    one_of,
    warn_of_divergences,
    warn_of_stuck_chains,
)
from pyro_bdl.mcmc.starts import Restriction, starting_vectors
from pyro_bdl.program.hidden_sites import require_visible_latents
from pyro_bdl.program.program import Program
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.supports import check_support
from pyro_bdl.program.validation import check_finite
from pyro_bdl.samples import Samples
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.random_state import seeded

_SAME = 1e-4  # relative tolerance: sums in float32 depend on the number of threads


def sample(
    model: Callable,
    *args: Any,
    kernel: str = "nuts",
    backend: str = "numpyro",
    num_warmup: int = 500,
    num_samples: int = 500,
    num_chains: int = 1,
    seed: int = 0,
    init: Any = "prior",
    target_accept: float = 0.8,
    max_tree_depth: int = 10,
    trajectory_length: float | None = None,
    dense_mass: bool = False,
    chain_method: str = "parallel",
    subset: Subset | None = None,
    at: Tensor | None = None,
    progress: bool = True,
    model_kwargs: Mapping[str, Any] | None = None,
) -> Samples:
    """Draw from the posterior of a Pyro program by Hamiltonian Monte Carlo.

    The program runs in evaluation mode with all its data at once. ``backend="numpyro"`` traces its
    log density to ATen operators and evaluates them in JAX; ``backend="pyro"`` runs the program
    itself at every step. For a program under ``handlers.temper`` the target is the tempered
    posterior. The same seed gives the same draws. Ctrl-C keeps the draws made so far.

    :param model: a Pyro program with continuous latents.
    :param args: the program's arguments, including the targets.
    :param model_kwargs: the program's keyword arguments.
    :param kernel: "nuts" (Hoffman & Gelman 2014) or "hmc" (Neal 2011).
    :param num_warmup: iterations per chain that adapt step size and mass matrix, not kept.
    :param num_samples: draws per chain.
    :param init: where the chains start: "prior" (each at a draw of the prior), "uniform"
        (unconstrained numbers between -2 and 2, as in NumPyro), "network" (the values of the
        networks' parameters), a guide or ``Samples`` (each at a draw of it), or a dict of latents.
    :param target_accept: the target acceptance probability of the step size adaptation.
    :param max_tree_depth: NUTS takes at most 2^depth gradient steps per draw.
    :param trajectory_length: step size times number of steps of HMC, 2 pi by default.
    :param dense_mass: adapt a full mass matrix (P x P) instead of its diagonal.
    :param chain_method: "parallel" (on separate threads), "vectorized" (in lockstep) or
        "sequential"; for NumPyro only, Pyro's chains are always sequential.
    :param subset: the latents' unconstrained numbers to draw; the others stay fixed.
    :param at: the unconstrained vector (P,) that holds the fixed numbers; given with ``subset``.
    :param progress: show a progress bar.
    :returns: draws in the latents' supports, on the program's device, with statistics.
    :warns BdlWarning: if the program draws random numbers, if more than a tenth of the draws ended
        in a divergence, or if chains hardly moved from their start.
    :raises TypeError: if the number of draws or chains is not a whole number.
    :raises UnsupportedProgramError: for a program without observed sites, with discrete latents
        that cannot be summed out, or with latents that ``poutine.block`` hides.
    :raises MissingOperatorError: if an operator has no translation to JAX.
    :raises ValueError: for data that are not finite, targets outside their support, or a plate that
        holds a part of its data.
    """
    settings = Settings(
        kernel=one_of("kernel", kernel, ("nuts", "hmc")),
        num_warmup=at_least("num_warmup", num_warmup, 0),
        num_samples=at_least("num_samples", num_samples, 1),
        seed=seed,
        target_accept=target_accept,
        max_tree_depth=at_least("max_tree_depth", max_tree_depth, 1),
        trajectory_length=trajectory_length,
        dense_mass=dense_mass,
        chain_method=one_of("chain_method", chain_method, ("vectorized", "parallel", "sequential")),
        progress=progress,
    )
    one_of("backend", backend, ("numpyro", "pyro"))
    at_least("num_chains", num_chains, 1)
    if not 0 < target_accept < 1:
        raise ValueError(f"target_accept must lie between 0 and 1, got {target_accept}")
    if trajectory_length is not None and not trajectory_length > 0:
        raise ValueError(f"trajectory_length must be positive, got {trajectory_length}")
    kwargs = dict(model_kwargs or {})
    check_finite(model, args, kwargs)
    started = time.perf_counter()
    with evaluation_mode(model, args, kwargs, init), seeded(seed):
        program = Program(model, *args, **kwargs)
        program.require_observed()
        require_visible_latents(model, args, kwargs)
        require_all_data(program)
        with torch.no_grad():
            check_support(program.run(program.initial))
        restriction = Restriction(program, subset, at)
        start = starting_vectors(restriction, init, num_chains)
        _warn_if_random(restriction, start[0], backend)
        target = Target(
            lambda vector: restriction.log_density(vector),  # make_fx would count a method's self
            restriction.log_density_terms,
        )
    with evaluation_mode(model, args, kwargs):
        chains = _runner(backend)(target, start, settings)
    if chains.interrupted:
        warnings.warn(
            f"interrupted: {chains.vectors.shape[1]} of {num_samples} draws per chain were made",
            BdlWarning,
            stacklevel=2,
        )
    warn_of_divergences(chains)
    warn_of_stuck_chains(chains)
    info = {
        "kernel": kernel,
        "backend": backend,
        "num_warmup": num_warmup,
        "seed": seed,
        "target_accept": target_accept,
        "seconds": time.perf_counter() - started,
        "interrupted": chains.interrupted,
    }
    return _as_samples(restriction, chains, info)


def _runner(backend: str) -> Callable[[Target, Tensor, Settings], Chains]:
    if backend == "pyro":
        from pyro_bdl.mcmc.hmc import pyro_backend

        return pyro_backend.run
    from pyro_bdl.mcmc.hmc import numpyro_backend

    return numpyro_backend.run


@torch.no_grad()
def _warn_if_random(restriction: Restriction, vector: Tensor, backend: str) -> None:
    """Warn if two runs at the same latents differ.

    The random states of numpy and Python are restored.
    """
    python, numpy = random.getstate(), np.random.get_state()
    try:
        first, second = (float(restriction.log_density(vector)) for _ in range(2))
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
    if abs(first - second) <= _SAME * max(abs(first), abs(second)):
        return
    held = "keeps from a single run" if backend == "numpyro" else "treats as one density"
    warnings.warn(
        f"the program's log density is {first:.6g} in one run and {second:.6g} in another at the "
        "same latents: it computes with random numbers of torch, numpy or Python or with a "
        f"counter, which MCMC {held}; make them latents (pyro.sample) or arguments",
        BdlWarning,
        stacklevel=3,
    )


@torch.no_grad()
def _as_samples(restriction: Restriction, chains: Chains, info: dict[str, Any]) -> Samples:
    latents = restriction.constrain(chains.vectors)
    stats = dict(chains.stats)
    stats["diverging"] = stats["diverging"].bool()
    return Samples(latents, stats, info)


def require_all_data(program: Program) -> None:
    for name, (size, present) in program.plates.items():
        if present < size:
            raise ValueError(
                "MCMC needs all data in one call, without subsampling: the plate "
                f"'{name}' has size {size} but holds {present}"
            )

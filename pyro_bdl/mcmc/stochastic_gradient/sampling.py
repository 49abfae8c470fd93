"""``sgmcmc``: Langevin and Hamiltonian dynamics with gradients of minibatches."""

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_bdl.errors import BdlWarning
from pyro_bdl.mcmc.checkpoint import Journal
from pyro_bdl.mcmc.starts import Restriction, checked_program, starting_vectors
from pyro_bdl.mcmc.stochastic_gradient.chains import StepSize, Track, Walk, kept_steps
from pyro_bdl.mcmc.stochastic_gradient.methods import METHODS, Method
from pyro_bdl.mcmc.stochastic_gradient.minibatches import MinibatchSource
from pyro_bdl.program.check import check_finite
from pyro_bdl.program.subset import Subset
from pyro_bdl.samples import Samples
from pyro_bdl.utils.memory import available_memory
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.random_state import own_randomness, seeded
from pyro_bdl.utils.validation import check_temperature, whole_number


def sgmcmc(
    model: Callable,
    data: Any,
    *,
    step_size: StepSize,
    method: str = "sghmc",
    num_warmup: int = 1000,
    num_samples: int = 500,
    thinning: int = 10,
    adapt_step_size: bool = False,
    num_chains: int = 1,
    batch_size: int | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    init: Any = "prior",
    checkpoint: str | Path | None = None,
    subset: tuple[Subset, Tensor] | None = None,
    progress: bool | None = None,
    **options: float,
) -> Samples:
    """Draw from the posterior of a Pyro program by stochastic-gradient MCMC.

    Each step moves all chains along the gradient of the log density of one minibatch, its
    likelihood scaled by N/B, in the latents' unconstrained space::

        "sgld"   stochastic-gradient Langevin dynamics (Welling & Teh 2011)
        "psgld"  the same, preconditioned as RMSprop (Li et al. 2016); averaging=, damping=
        "sghmc"  underdamped Langevin dynamics (Chen et al. 2014); friction=
        "sgnht"  the same, its friction found by a thermostat (Ding et al. 2014); friction=
        "smile"  microcanonical Langevin dynamics (Sommer et al. 2026); friction=

    The step size multiplies the gradient in all methods; the files in ``samplers`` hold the
    equations. All chains move at once by ``vmap``, with separate noise and the same minibatch. The
    program runs in evaluation mode. For a program under ``handlers.temper`` the target is the
    tempered posterior. The same seed gives the same draws if the data come in the same order. The
    draws made so far are kept after Ctrl-C, and if the chains diverge.

    :param model: a Pyro program with continuous latents; for minibatches it must know N
        (``num_data=`` of the ready-made programs).
    :param data: ``(x, y)``, or an iterable of such batches that can be iterated over several times,
        such as a ``DataLoader``.
    :param step_size: a number, or a function of the step from 0, such as ``mcmc.Polynomial`` or
        ``mcmc.Cyclical``, which explores without noise and keeps no draws in a part of each cycle.
        See ``mcmc.suggest_step_size``.
    :param adapt_step_size: halve the step size whenever a chain diverges in the warm-up, and go on
        from where it was sound; ``step_size`` is then the largest one that is tried. The entry
        ``step_size_factor`` of ``info`` says what is left of it.
    :param num_warmup: steps before the first draw. In the first half of them "psgld" adapts its
        preconditioner, and "sgnht" runs without its thermostat.
    :param num_samples: draws per chain.
    :param thinning: steps between draws; exploring steps do not count.
    :param num_chains: the number of chains.
    :param batch_size: rows of each minibatch of ``(x, y)``; by default all rows.
    :param temperature: T; the stationary density is the posterior's to the power 1/T.
    :param init: where the chains start: "prior" (each at a draw of the prior), "uniform"
        (unconstrained numbers between -2 and 2, as in NumPyro), "network" (the values of the
        networks' parameters), a guide or ``Samples`` (each at a draw of it), or a dict of latents.
    :param checkpoint: a folder. Draws and state are written there every few seconds, and the same
        call goes on from what it finds there: killed at any moment, it ends with the same draws as
        an uninterrupted one. A larger ``num_samples`` adds draws. The order of an iterable's
        batches must come from torch's random numbers or be fixed.
    :param subset: the unconstrained numbers to draw, and the vector (P,) that holds the others.
    :param progress: show a progress bar; by default in terminals and notebooks.
    :param options: options of the method, see its file in ``samplers``.
    :returns: draws in the latents' supports, with statistics: ``step_size``; ``potential_energy``
        (nats, on the minibatch that followed the draw, scaled to all data);
        ``configurational_temperature`` -(u - u_0)' grad log p(u) / P with u_0 the chain's start,
        and ``kinetic_temperature`` of "sghmc" and "sgnht", both with mean T if the step size is
        small enough; ``friction`` of "sgnht". The entry ``failure`` of
        ``info`` says why the chains ended early, if they did.
    :raises UnsupportedProgramError: for a program without observed sites or with discrete latents.
    :raises ValueError: for data that are not finite, targets outside their support, a program that
        does not know N, a step size that diverges before the first draw, a checkpoint of another
        run, or an argument outside its range.
    :raises MemoryError: if the draws would not fit.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got '{method}'")
    chosen = METHODS[method]
    num_samples = whole_number(num_samples, "num_samples")
    thinning = whole_number(thinning, "thinning")
    num_chains = whole_number(num_chains, "num_chains")
    num_warmup = whole_number(num_warmup, "num_warmup", least=2 if chosen.settle else 0)
    check_temperature(temperature)
    check_step_size(step_size)
    check_options(method, chosen, options)
    started = time.perf_counter()
    with evaluation_mode(model, init), seeded(seed):
        batches = MinibatchSource(data, batch_size)
        restriction = checked_restriction(model, batches, subset)
        start = starting_vectors(restriction, init, num_chains)
        _check_memory(num_samples, start)
        journal = None
        if checkpoint is not None:
            settings = {
                "method": method,
                "num_warmup": num_warmup,
                "thinning": thinning,
                "adapt_step_size": adapt_step_size,
                "batch_size": batches.size,
                "temperature": temperature,
                "seed": seed,
                **options,
            }
            journal = _journal(checkpoint, settings, restriction, batches, start, step_size)
        walk = Walk(
            chosen,
            restriction,
            batches,
            start,
            step_size=step_size,
            temperature=temperature,
            adapt=adapt_step_size,
            options=options,
            journal=journal,
        )
        steps = kept_steps(step_size, num_warmup, num_samples, thinning)
        track = walk.run(steps, num_warmup, progress)
    _warn_of_early_end(track, num_samples)
    info = {
        "method": method,
        "step_size": step_size if isinstance(step_size, float | int) else repr(step_size),
        "step_size_factor": walk.factor,
        "num_warmup": num_warmup,
        "thinning": thinning,
        "batch_size": batches.size,
        "temperature": temperature,
        "seed": seed,
        "seconds": time.perf_counter() - started,
        "steps": track.steps,
        "interrupted": track.interrupted,
        "failure": track.failure,
        **options,
    }
    with torch.no_grad():
        return Samples(restriction.constrain(track.vectors), track.stats, info)


def _journal(
    folder: str | Path,
    settings: dict[str, Any],
    restriction: Restriction,
    batches: MinibatchSource,
    start: Tensor,
    step_size: StepSize,
) -> Journal:
    if start.dtype == torch.bfloat16:
        raise ValueError("a checkpoint cannot hold bfloat16: make the program float32 or float64")
    args, kwargs = batches.first
    with torch.no_grad(), own_randomness():
        values = torch.stack([restriction.log_density(row, *args, **kwargs) for row in start])
    size = step_size if callable(step_size) else lambda step: step_size
    identity = {
        "starts": start.cpu().numpy(),
        "log densities": values.cpu().numpy(),
        "step sizes": np.array([size(step) for step in (0, 1, 10, 100, 1000, 10_000)]),
    }
    return Journal(folder, settings, identity)


def _warn_of_early_end(track: Track, num_samples: int) -> None:
    """Warn of chains that ended early.

    :raises ValueError: if they diverged before the first draw.
    """
    made = track.vectors.shape[1]
    if track.failure is not None:
        if not made:
            raise ValueError(f"{track.failure} (there was no draw before it)")
        warnings.warn(
            f"{track.failure}; the {made} of {num_samples} draws per chain made before it are "
            "kept; the last of them may already be wrong",
            BdlWarning,
            stacklevel=3,
        )
    elif track.interrupted:
        warnings.warn(
            f"interrupted: {made} of {num_samples} draws per chain were made",
            BdlWarning,
            stacklevel=3,
        )


# -------------------------------------------------------------------------- checks of arguments


def checked_restriction(
    model: Callable, batches: MinibatchSource, subset: tuple[Subset, Tensor] | None
) -> Restriction:
    """The program on the first minibatch.

    :raises ValueError: for data that are not finite, targets outside their support, a program that
        does not know N.
    """
    args, kwargs = batches.first
    whole, named = getattr(batches, "whole", batches.first)
    check_finite(model, whole, named)
    program = checked_program(model, args, kwargs)
    batches.check_scale(program)
    return Restriction(program, subset)


def check_options(method: str, chosen: Method, options: dict[str, float]) -> None:
    """Check the names of a method's options.

    :raises TypeError: for an option that the method does not have.
    """
    for name in options:
        if name not in chosen.options:
            there = ", ".join(chosen.options) or "none"
            raise TypeError(
                f"sgmcmc has no argument '{name}' with method '{method}' (its options: {there})"
            )


def check_step_size(step_size: StepSize) -> None:
    if not callable(step_size) and not 0 < step_size < float("inf"):
        raise ValueError(f"step_size must be a positive finite number, got {step_size}")


def _check_memory(num_samples: int, start: Tensor) -> None:
    needed = num_samples * start.numel() * start.element_size()
    there = available_memory(start.device)
    if there is not None and needed > there:
        raise MemoryError(
            f"{num_samples} draws of {len(start)} chains over {start.shape[-1]} numbers take "
            f"{needed / 2**30:.1f} GiB, of which {there / 2**30:.1f} are free: keep fewer draws "
            "(num_samples), or sample a subset"
        )

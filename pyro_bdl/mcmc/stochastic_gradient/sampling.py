"""``sgmcmc``: Langevin and Hamiltonian dynamics with gradients of minibatches, and a step size."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_bdl.errors import warn
from pyro_bdl.mcmc.chains import Journal
from pyro_bdl.mcmc.starts import Restriction, as_start, checked_program, starting_vectors
from pyro_bdl.mcmc.stochastic_gradient.kernels import StochasticKernel
from pyro_bdl.mcmc.stochastic_gradient.minibatches import MinibatchSource
from pyro_bdl.mcmc.stochastic_gradient.walk import Walk
from pyro_bdl.program.check import check_finite
from pyro_bdl.program.samples import Samples
from pyro_bdl.utils.module_state import device_of, evaluation_mode, vmappable
from pyro_bdl.utils.random_state import checked_seed, own_randomness, seeded
from pyro_bdl.utils.validation import as_path, real_number, whole_number

_MOST_ITERATIONS = 100  # of the power iteration
_TOLERANCE = 0.01


def sgmcmc(
    model: Callable,
    data: Any,
    *,
    kernel: StochasticKernel,
    num_warmup: int = 1000,
    num_samples: int = 500,
    num_chains: int = 1,
    batch_size: int | None = None,
    seed: int = 0,
    init: Any = None,
    checkpoint: str | Path | None = None,
    subset: Any = None,
    progress: bool | None = None,
) -> Samples:
    """Draw from the posterior of a Pyro program by stochastic-gradient MCMC.

    Each step moves all chains along the gradient of the log density of one minibatch, its
    likelihood scaled by N/B, in the latents' unconstrained space. All chains move at once by
    ``vmap``, with separate noise and the same minibatch. The program runs in evaluation mode. For a
    program under ``handlers.temper`` the target is the tempered posterior. The same seed gives the
    same draws if the data come in the same order. The draws made so far are kept after Ctrl-C, and
    if the chains diverge. On a CPU, 5,000 steps or more on all data at one step size run in one
    compiled loop of JAX.

    :param model: a Pyro program with continuous latents; for minibatches it must know N
        (``num_data=`` of the ready-made programs).
    :param data: ``(x, y)``, or an iterable of such batches that can be iterated over several times,
        such as a ``DataLoader``, or a function that makes one. They are moved to the device of the
        program's tensors.
    :param kernel: ``mcmc.SGLD(step_size=...)`` or ``SGHMC``, or the rarer ``PSGLD``, ``SGNHT``
        and ``SMILE`` of ``contrib.stochastic_gradient``; ``mcmc.suggest_step_size`` finds a step.
    :param num_warmup: steps before the first draw.
    :param num_samples: draws per chain.
    :param num_chains: the number of chains.
    :param batch_size: rows of each minibatch of ``(x, y)``; by default all rows. Each pass is in a
        new random order and leaves out what does not fill a batch at its end. A loader has its own
        batches, and a last smaller one of b rows counts N / b times.
    :param init: where the chains start, as of ``mcmc.sample``.
    :param checkpoint: a folder, as of ``mcmc.sample``. The order of an iterable's batches must come
        from torch's random numbers or be fixed.
    :param subset: as of ``mcmc.sample``.
    :param progress: show a progress bar; by default in terminals and notebooks.
    :returns: draws in the latents' supports, with statistics: ``step_size``; ``potential_energy``
        (nats, on the minibatch that followed the draw, scaled to all data);
        ``configurational_temperature`` -(u - u_0)' grad log p(u) / P with u_0 the chain's start,
        and ``kinetic_temperature`` of SGHMC and SGNHT, both with mean T if the step size is small
        enough; ``friction`` of SGNHT. The entry ``failure`` of ``info`` says why the chains ended
        early, if they did.
    :raises UnsupportedProgramError: for a program without observed sites or with discrete latents.
    :raises ValueError: for data that are not finite, targets outside their support, a program that
        does not know N, a step size that diverges before the first draw, a checkpoint of another
        run, or an argument outside its range.
    :raises MemoryError: if the draws would not fit.
    """
    if not isinstance(kernel, StochasticKernel):
        raise TypeError(f"kernel must be an object such as mcmc.SGHMC(step_size=), got {kernel!r}")
    num_samples, seed = whole_number(num_samples, "num_samples"), checked_seed(seed)
    num_chains = whole_number(num_chains, "num_chains")
    num_warmup = whole_number(num_warmup, "num_warmup", least=2 if kernel.settles else 0)
    folder = None if checkpoint is None else as_path(checkpoint, "checkpoint")
    started, init = time.perf_counter(), as_start(init, subset)
    with evaluation_mode(model, init), seeded(seed):
        batches = MinibatchSource(data, batch_size, device=device_of(model))
        restriction = checked_restriction(model, batches, subset, init)
        restriction.require_memory(num_chains, num_samples)
        start = starting_vectors(restriction, init, num_chains)
        described = restriction.described(start[0])
        info = {
            "kernel": kernel.name,
            "num_warmup": num_warmup,
            "batch_size": batches.size,
            "seed": seed,
            "options": kernel.options(),
        }
        journal = None
        if folder is not None:
            journal = _journal(folder, info, restriction, batches, start, kernel)
        walk = Walk(kernel, restriction, batches, start, journal)
        chains = walk.run(num_warmup, num_samples, progress)
    _warn_of_early_end(walk, chains.interrupted, num_samples)
    info |= {
        "step_size_factor": walk.factor,
        "seconds": time.perf_counter() - started,
        "steps": walk.steps,
        "interrupted": chains.interrupted,
        "failure": walk.failure,
    }
    with torch.no_grad():
        latents = restriction.constrain(chains.vectors)
    return Samples(latents, chains.stats, info, program=described)


def checked_restriction(
    model: Callable,
    batches: MinibatchSource,
    subset: Any,
    init: Any = None,
) -> Restriction:
    """The program on the first minibatch, at first run at ``init`` where that says values.

    :raises ValueError: for data that are not finite, targets outside their support, a program that
        does not know N.
    """
    check_finite(model, *batches.whole)
    program, _ = checked_program(model, *batches.first, init)
    batches.check_scale(program)
    return Restriction(program, subset)


def _journal(
    folder: Path,
    info: dict[str, Any],
    restriction: Restriction,
    batches: MinibatchSource,
    start: Tensor,
    kernel: StochasticKernel,
) -> Journal:
    args, kwargs = batches.first
    with torch.no_grad(), own_randomness():
        values = torch.stack([restriction.log_density(row, *args, **kwargs) for row in start])
    arrays = {
        "starts": start.cpu(),
        "log densities": values.cpu(),
        "step sizes": np.array([kernel.size(step) for step in (0, 1, 10, 100, 1000, 10_000)]),
    }
    return Journal(folder, {**info, **info["options"], "options": None, "step_size": None} | arrays)


def _warn_of_early_end(walk: Walk, interrupted: bool, num_samples: int) -> None:
    """Warn of chains that ended early.

    :raises ValueError: if they diverged before the first draw.
    """
    if walk.failure is not None:
        if not walk.kept:
            raise ValueError(f"{walk.failure} (there was no draw before it)")
        message = (
            f"{walk.failure}; the {walk.kept} of {num_samples} draws per chain made before it are "
            "kept; the last of them may already be wrong"
        )
    elif interrupted:
        message = f"interrupted: {walk.kept} of {num_samples} draws per chain were made"
    else:
        return
    warn(message, "chains-that-end-early")


def suggest_step_size(
    model: Callable,
    data: Any,
    *,
    at: Any,
    fraction: float = 0.1,
    num_points: int = 1,
    batch_size: int | None = None,
    seed: int = 0,
) -> float:
    """A step size eps = fraction / lambda for ``sgmcmc``, with lambda the largest curvature.

    lambda is the largest absolute eigenvalue of the Hessian of log p(u, y) in the unconstrained
    latents, at points ``at`` of high posterior density, on all data or on the first minibatch. For
    a Normal posterior, Langevin dynamics is stable up to fraction 2, and its variance is too large
    by at most the factor 1 / (1 - fraction / 2); "sghmc" is stable up to fraction 4.

    :param model: a Pyro program with continuous latents.
    :param data: see ``sgmcmc``, which also explains ``batch_size``.
    :param at: the points: a trained guide or ``Samples`` (draws), or a dict of latents. At draws
        the curvature can be many times that of the MAP.
    :param fraction: positive.
    :param num_points: the number of draws; lambda is the largest curvature at any of them.
    :returns: the step size.
    :raises ValueError: as ``sgmcmc``; for a fraction that is not positive, or a curvature that is
        zero or not finite.
    """
    fraction = real_number(fraction, "fraction")
    with evaluation_mode(model, at), seeded(seed):
        batches = MinibatchSource(data, batch_size, device=device_of(model))
        restriction = checked_restriction(model, batches, None, at)
        vectors = starting_vectors(restriction, at, whole_number(num_points, "num_points"))
        curvatures = [largest_curvature(restriction, vector) for vector in vectors]
    for number, curvature in enumerate(curvatures):
        if not 0 < curvature < math.inf:
            raise ValueError(
                f"the largest curvature at point {number} (counted from 0) is {curvature:g}, which "
                "no step size follows from: give other points of high posterior density"
            )
    return fraction / max(curvatures)


def largest_curvature(restriction: Restriction, vector: Tensor) -> float:
    """The largest absolute eigenvalue of the log density's Hessian at a vector (p,).

    By power iteration, to one percent.
    """
    leaf = vector.detach().requires_grad_()
    with torch.enable_grad(), vmappable():  # fused attention has no second derivative
        (gradient,) = torch.autograd.grad(restriction.log_density(leaf), leaf, create_graph=True)
    direction = torch.randn_like(vector)
    previous = 0.0
    for _ in range(_MOST_ITERATIONS):
        direction = direction / direction.norm()
        (direction,) = torch.autograd.grad(gradient, leaf, direction, retain_graph=True)
        value = float(direction.norm())
        if abs(value - previous) <= _TOLERANCE * value / 10:
            break
        previous = value
    return value

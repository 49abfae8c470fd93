"""``sample``: Markov chains on a Pyro program with all its data."""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
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
    warn_of_energy_variance,
    warn_of_stuck_chains,
)
from pyro_bdl.mcmc.starts import Restriction, starting_vectors
from pyro_bdl.program.check import check_finite
from pyro_bdl.program.program import Program
from pyro_bdl.program.subset import Subset
from pyro_bdl.samples import NO_STATE, Samples
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.random_state import seeded

_MICROCANONICAL = ("mclmc", "mams")
# Which kernels have an option.
_KERNELS = {
    "target_accept": ("nuts", "hmc", "mams"),
    "trajectory_length": ("hmc",),
    "energy_variance": ("mclmc",),
    "thinning": ("mclmc",),
}


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
    target_accept: float | None = None,
    max_tree_depth: int = 10,
    trajectory_length: float | None = None,
    dense_mass: bool = False,
    step_size: float | None = None,
    inverse_mass: Tensor | None = None,
    adapt_mass: bool | None = None,
    energy_variance: float | None = None,
    thinning: int | None = None,
    checkpoint: str | Path | None = None,
    chain_method: str = "parallel",
    subset: Subset | None = None,
    at: Tensor | None = None,
    progress: bool | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> Samples:
    """Draw from the posterior of a Pyro program by Hamiltonian or microcanonical dynamics.

    The kernels are::

        "nuts"    the no-U-turn sampler (Hoffman & Gelman 2014)
        "hmc"     Hamiltonian Monte Carlo (Neal 2011)
        "mclmc"   microcanonical Langevin dynamics (Robnik & Seljak 2024), unadjusted: its bias is
                  controlled by energy_variance; for posteriors of many numbers
        "mams"    microcanonical dynamics with a Metropolis step (Robnik et al. 2025), exact

    The program runs in evaluation mode with all its data at once. ``backend="numpyro"`` traces its
    log density to ATen operators and evaluates them in JAX; ``backend="pyro"`` runs the program
    itself at every step, for "nuts" and "hmc". For a program under ``handlers.temper`` the target
    is the tempered posterior. The same seed gives the same draws. Ctrl-C keeps the draws made so
    far.

    :param model: a Pyro program with continuous latents.
    :param args: the program's arguments, including the targets.
    :param model_kwargs: the program's keyword arguments.
    :param kernel: "nuts", "hmc", "mclmc" or "mams".
    :param num_warmup: iterations per chain that adapt step size and mass matrix, not kept. An
        iteration of "mclmc" is ``thinning`` steps.
    :param num_samples: draws per chain.
    :param init: where the chains start: "prior" (each at a draw of the prior), "uniform"
        (unconstrained numbers between -2 and 2, as in NumPyro), "network" (the values of the
        networks' parameters), a guide or ``Samples`` (each at a draw of it), or a dict of latents.
    :param target_accept: the target acceptance probability of the step size adaptation, by default
        0.8, and 0.9 of "mams".
    :param max_tree_depth: NUTS takes at most 2^depth gradient steps per draw; "mams" as many on
        average.
    :param trajectory_length: step size times number of steps of HMC, 2 pi by default.
    :param dense_mass: adapt a full mass matrix (P x P) instead of its diagonal; not of "mclmc" and
        "mams".
    :param step_size: the step size, then not adapted; in units of the metric.
    :param inverse_mass: the metric: an estimate of the variances (P,) or the covariance (P, P) of
        the unconstrained latents, such as ``guide.variances()``; by default 1.
    :param adapt_mass: whether the warm-up adapts the metric; by default only if none is given.
    :param energy_variance: the target of "mclmc" for the variance of a step's energy error per
        number, in nats^2, by default 5e-4. A larger one means longer steps and more bias: on ReLU
        networks f spreads 2 % too far at 5e-4, 6 % at 0.005 and about 10 % at 0.05, with 1.5 and 2
        times the effective draws. Steps with an error above 5 sqrt(P energy_variance) are taken in
        parts; at the kinks of a network the variance reached is then up to 3 times the target.
    :param thinning: steps of "mclmc" in an iteration, 20 by default; each takes two gradients, and
        more where it is taken in parts. The statistic ``num_steps`` is the number of gradients.
    :param chain_method: "parallel" (on separate threads and devices), "vectorized" (by ``vmap``),
        or "sequential"; the draws are the same up to rounding. Pyro's chains are always sequential.
        Vectorized chains move in lockstep: each iteration of "nuts" takes as long as the deepest
        tree of all chains, each step of "mclmc" as long as the chain that takes it in most parts.
        On the CPU "parallel" is therefore faster, on an accelerator "vectorized".
    :param checkpoint: a folder. Draws and state are written there every few seconds, and the same
        call goes on from what it finds there: killed at any moment, it ends with the same draws as
        an uninterrupted one. A larger ``num_samples`` adds draws.
    :param subset: the latents' unconstrained numbers to draw; the others stay fixed.
    :param at: the unconstrained vector (P,) that holds the fixed numbers; given with ``subset``.
    :param progress: show a progress bar; by default in terminals and notebooks.
    :returns: draws in the latents' supports, on the program's device, with statistics. Of "mclmc",
        ``energy_variance`` is the one reached, averaged over the steps of a draw, and
        ``momentum_length`` the length L.
    :warns BdlWarning: if more than a tenth of the draws ended in a divergence, if chains hardly
        moved from their start, or if the energy variance of "mclmc" is more than ten times its
        target or less than a hundredth of it.
    :raises TypeError: if the number of draws or chains is not a whole number.
    :raises UnsupportedProgramError: for a program without observed sites, with discrete latents
        that cannot be summed out, or with latents that ``poutine.block`` hides.
    :raises MissingOperatorError: if an operator has no translation to JAX.
    :raises ValueError: for data that are not finite, targets outside their support, a plate that
        holds a part of its data, or a checkpoint of another run.
    """
    one_of("kernel", kernel, ("nuts", "hmc", *_MICROCANONICAL))
    one_of("backend", backend, ("numpyro", "pyro"))
    one_of("chain_method", chain_method, ("vectorized", "parallel", "sequential"))
    at_least("num_chains", num_chains, 1)
    _check_options(
        kernel,
        target_accept=target_accept,
        trajectory_length=trajectory_length,
        energy_variance=energy_variance,
        thinning=thinning,
    )
    if target_accept is None:
        target_accept = 0.9 if kernel == "mams" else 0.8
    energy_variance = _positive("energy_variance", energy_variance)
    if not 0 < target_accept < 1:
        raise ValueError(f"target_accept must lie between 0 and 1, got {target_accept}")
    if inverse_mass is not None:
        inverse_mass = torch.as_tensor(inverse_mass, device="cpu").detach()
    _check_fit(kernel, backend, dense_mass, inverse_mass)
    if backend == "pyro" and checkpoint is not None:
        raise ValueError("checkpoint is for JAX: leave out backend='pyro'")
    settings = Settings(
        kernel=kernel,
        num_warmup=at_least("num_warmup", num_warmup, 0),
        num_samples=at_least("num_samples", num_samples, 1),
        seed=seed,
        target_accept=target_accept,
        max_tree_depth=at_least("max_tree_depth", max_tree_depth, 1),
        trajectory_length=_positive("trajectory_length", trajectory_length),
        dense_mass=dense_mass or (inverse_mass is not None and inverse_mass.dim() == 2),
        chain_method="sequential" if backend == "pyro" else chain_method,
        progress=progress,
        step_size=_positive("step_size", step_size),
        inverse_mass=None if inverse_mass is None else inverse_mass.numpy(),
        adapts_mass=inverse_mass is None if adapt_mass is None else adapt_mass,
        energy_variance=Settings.energy_variance if energy_variance is None else energy_variance,
        thinning=None if thinning is None else at_least("thinning", thinning, 1),
        checkpoint=None if checkpoint is None else str(checkpoint),
    )
    started = time.perf_counter()
    run = _Run(model, args, dict(model_kwargs or {}), settings, backend, subset, at)
    with evaluation_mode(model, args, run.kwargs, init), seeded(seed):
        restriction = run.restriction()
        start = starting_vectors(restriction, init, num_chains)
        _check_metric(settings.inverse_mass, start.shape[-1])
    return run.samples(restriction, start, started)


def extend(
    samples: Samples,
    num_samples: int,
    model: Callable,
    *args: Any,
    subset: Subset | None = None,
    at: Tensor | None = None,
    progress: bool | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> Samples:
    """All draws of ``samples`` and ``num_samples`` more of each chain, from the end of the chains.

    There is no new warm-up: the state in ``samples`` has step size, metric and random keys. The
    draws are those that a longer run of ``sample`` would have made.

    :param samples: of ``sample`` on NumPyro or JAX, also from a file.
    :param model: the program that made them, and its arguments; ``subset`` and ``at`` as then.
    :raises ValueError: for samples that cannot go on: of another program or other data, of another
        backend, or of chains that were interrupted at different draws.
    """
    made = samples.info.get("settings")
    backend = samples.info.get("backend", "numpyro")
    if made is None or not samples.state:
        raise ValueError(NO_STATE)
    started = time.perf_counter()
    count = at_least("num_samples", num_samples, 1)
    metric = samples.state.get("inverse_mass")
    settings = Settings(
        **made,
        num_samples=count,
        progress=progress,
        inverse_mass=None if metric is None else metric[0].numpy(),
    )
    run = _Run(model, args, dict(model_kwargs or {}), settings, backend, subset, at)
    with evaluation_mode(model, args, run.kwargs):
        restriction = run.restriction()
        example = _example(restriction).expand(samples.num_chains, -1)
    state = {name: value for name, value in samples.state.items() if name != "inverse_mass"}
    more = run.samples(restriction, example, started, state)
    latents = {
        name: torch.cat([value, more.latents[name]], 1) for name, value in samples.latents.items()
    }
    stats = {name: torch.cat([value, more.stats[name]], 1) for name, value in samples.stats.items()}
    info = dict(more.info)
    info["seconds"] += samples.info.get("seconds", 0.0)
    return Samples(latents, stats, info, more.state, more.resume)


@dataclass(frozen=True)
class _Run:
    """A call of ``sample``: the program with its arguments, and the settings."""

    model: Callable
    args: tuple
    kwargs: dict[str, Any]
    settings: Settings
    backend: str
    subset: Subset | None
    at: Tensor | None

    def restriction(self) -> Restriction:
        """The checked program; called in evaluation mode."""
        model, args, kwargs = self.model, self.args, self.kwargs
        check_finite(model, args, kwargs)
        program = Program(model, *args, **kwargs)
        program.check()
        require_all_data(program)
        return Restriction(program, self.subset, self.at)

    def samples(
        self,
        restriction: Restriction,
        start: Tensor,
        started: float,
        state: Mapping[str, Tensor] | None = None,
    ) -> Samples:
        settings, model = self.settings, self.model
        target = Target(
            lambda vector: restriction.log_density(vector),  # make_fx would count a method's self
            restriction.log_density_terms,
        )
        goes_on = {} if state is None else {"state": state}
        with evaluation_mode(model, self.args, self.kwargs):
            runner = _runner(settings.kernel, self.backend)
            chains = runner(target, start, settings, **goes_on)
        if chains.interrupted:
            warnings.warn(
                f"interrupted: {chains.vectors.shape[1]} of {settings.num_samples} draws per chain "
                "were made",
                BdlWarning,
                stacklevel=3,
            )
        warn_of_divergences(chains)
        warn_of_stuck_chains(chains)
        if settings.kernel == "mclmc":
            warn_of_energy_variance(chains, settings)
        info = {
            "kernel": settings.kernel,
            "backend": _name_of(settings.kernel, self.backend),
            "num_warmup": settings.num_warmup,
            "seed": settings.seed,
            "target_accept": settings.target_accept,
            "seconds": time.perf_counter() - started,
            "interrupted": chains.interrupted,
            "chain_method": settings.chain_method,
            "settings": settings.as_json(),
        }
        if settings.kernel == "mclmc":
            info["energy_variance"] = float(chains.stats["energy_variance"].double().mean())
        with torch.no_grad():
            latents = restriction.constrain(chains.vectors)
        stats = dict(chains.stats)
        stats["diverging"] = stats["diverging"].bool()
        samples = Samples(latents, stats, info)
        if not chains.state:
            return samples
        metric = settings.inverse_mass
        if metric is not None:
            chains.state["inverse_mass"] = torch.from_numpy(metric).expand(
                len(start), *metric.shape
            )
        return replace(samples, state=chains.state, resume=self._resume)

    def _resume(self, samples: Samples, num_samples: int) -> Samples:
        return extend(
            samples,
            num_samples,
            self.model,
            *self.args,
            subset=self.subset,
            at=self.at,
            progress=self.settings.progress,
            model_kwargs=self.kwargs,
        )


def _name_of(kernel: str, backend: str) -> str:
    return "jax" if kernel in _MICROCANONICAL and backend == "numpyro" else backend


def _example(restriction: Restriction) -> Tensor:
    program = restriction.program
    return restriction.chosen(program.unconstrain(program.initial).detach())


def _positive(name: str, value: Any) -> float | None:
    """Check a number, which may be a tensor, and return it."""
    if value is None:
        return None
    try:
        value = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be positive, got {value:g}")
    return value


def _check_options(kernel: str, **given: Any) -> None:
    """Check that the kernel has the options that were given."""
    for name, value in given.items():
        if value is not None and kernel not in _KERNELS[name]:
            others = " and ".join(f"'{other}'" for other in _KERNELS[name])
            raise ValueError(f"kernel='{kernel}' has no {name}, which is of {others}: leave it out")


def _check_fit(kernel: str, backend: str, dense_mass: bool, inverse_mass: Tensor | None) -> None:
    """Check that kernel, backend and metric go together."""
    if backend == "pyro" and (kernel in _MICROCANONICAL or inverse_mass is not None):
        what = f"kernel='{kernel}'" if kernel in _MICROCANONICAL else "inverse_mass"
        raise ValueError(f"{what} runs in JAX only: leave out backend='pyro'")
    if dense_mass and kernel in _MICROCANONICAL:
        raise ValueError(
            f"kernel='{kernel}' adapts a diagonal metric only: leave out dense_mass, or give the "
            "covariance as inverse_mass"
        )


def _check_metric(inverse_mass: np.ndarray | None, size: int) -> None:
    if inverse_mass is None:
        return
    if inverse_mass.shape not in ((size,), (size, size)):
        raise ValueError(
            f"inverse_mass must have shape ({size},) or ({size}, {size}), got {inverse_mass.shape}"
        )
    variances = inverse_mass if inverse_mass.ndim == 1 else inverse_mass.diagonal()
    if not (np.isfinite(inverse_mass).all() and (variances > 0).all()):
        raise ValueError("inverse_mass must hold finite numbers, and positive variances")


def _runner(kernel: str, backend: str) -> Callable[[Target, Tensor, Settings], Chains]:
    if kernel in _MICROCANONICAL:
        from pyro_bdl.mcmc.microcanonical.run import run

        return run
    if backend == "pyro":
        from pyro_bdl.mcmc.hmc import pyro_backend

        return pyro_backend.run
    from pyro_bdl.mcmc.hmc import numpyro_backend

    return numpyro_backend.run


def require_all_data(program: Program) -> None:
    for name, (size, present) in program.plates.items():
        if present < size:
            raise ValueError(
                "MCMC needs all data in one call, without subsampling: the plate "
                f"'{name}' has size {size} but holds {present}"
            )

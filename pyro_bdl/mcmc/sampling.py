"""``sample``: HMC and NUTS on a Pyro program, on Pyro's or NumPyro's implementation."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from pyro_bdl.checks import check_finite, check_support
from pyro_bdl.curvature.subset import Subset
from pyro_bdl.errors import BdlWarning
from pyro_bdl.mcmc.chains import Chains, Settings, Target
from pyro_bdl.modules import evaluation_mode
from pyro_bdl.posterior import latent_draws
from pyro_bdl.program import Program, trace_once
from pyro_bdl.samples import Samples

_ATTEMPTS = 100


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

    The program runs in evaluation mode with all its data at once. ``backend="numpyro"`` traces
    its log density to ATen operators and evaluates them in JAX; ``backend="pyro"`` runs the
    program itself at every step. A program under ``handlers.temper`` has its tempered posterior
    sampled. The same seed gives the same draws. Ctrl-C keeps the draws made so far.

    :param model: a Pyro program with continuous latents.
    :param args: its arguments, targets included; ``model_kwargs`` its keyword arguments.
    :param kernel: "nuts" (Hoffman & Gelman 2014) or "hmc" (Neal 2011).
    :param num_warmup: iterations per chain that adapt step size and mass matrix, not kept.
    :param num_samples: draws per chain.
    :param init: where the chains start: "prior" (a draw of the prior each), "network" (the
        networks' own values), a guide or ``Samples`` (a draw each), or a dict of latents.
    :param target_accept: the acceptance probability that the step size aims at.
    :param max_tree_depth: NUTS takes at most 2^depth gradient steps per draw.
    :param trajectory_length: step size times number of steps of HMC, 2 pi by default.
    :param dense_mass: adapt a full mass matrix (P x P) instead of its diagonal.
    :param chain_method: "parallel" (on threads of their own), "vectorized" (in lockstep) or
        "sequential"; of NumPyro, Pyro's chains are sequential.
    :param subset: draw only these of the latents' unconstrained numbers, the others staying ``at``
        an unconstrained vector (P,).
    :param progress: show a progress bar.
    :returns: draws in the latents' supports, on the program's device, with statistics.
    :raises UnsupportedProgramError: for a program without observed sites or with discrete latents.
    :raises MissingOperatorError: where an operator has no translation to JAX.
    :raises ValueError: for data that are not finite, targets outside of their support, or a plate
        that holds a part of its data.
    """
    settings = Settings(
        kernel=_one_of("kernel", kernel, ("nuts", "hmc")),
        num_warmup=_at_least("num_warmup", num_warmup, 0),
        num_samples=_at_least("num_samples", num_samples, 1),
        seed=seed,
        target_accept=target_accept,
        max_tree_depth=_at_least("max_tree_depth", max_tree_depth, 1),
        trajectory_length=trajectory_length,
        dense_mass=dense_mass,
        chain_method=_one_of(
            "chain_method", chain_method, ("vectorized", "parallel", "sequential")
        ),
        progress=progress,
    )
    _one_of("backend", backend, ("numpyro", "pyro"))
    _at_least("num_chains", num_chains, 1)
    if not 0 < target_accept < 1:
        raise ValueError(f"target_accept must lie between 0 and 1, got {target_accept}")
    kwargs = dict(model_kwargs or {})
    check_finite(model, args, kwargs)
    started = time.perf_counter()
    with evaluation_mode(), _seeded(seed):
        program = Program(model, *args, **kwargs)
        program.require_observed()
        _require_all_data(program)
        with torch.no_grad():
            check_support(program.run(program.initial))
        restriction = _Restriction(program, subset, at)
        start = _starting_vectors(restriction, init, num_chains)
        target = Target(
            lambda vector: restriction.log_density(vector),  # make_fx counts a method's self
            restriction.log_density_terms,
        )
        chains = _runner(backend)(target, start, settings)
    if chains.interrupted:
        warnings.warn(
            f"interrupted: {chains.vectors.shape[1]} of {num_samples} draws per chain were made",
            BdlWarning,
            stacklevel=2,
        )
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


class _Restriction:
    """A program's log density as a function of some of its latents' numbers (p,)."""

    def __init__(self, program: Program, subset: Subset | None, at: Tensor | None) -> None:
        if (subset is None) != (at is None):
            raise ValueError("give both subset and at, or neither")
        if at is not None and at.shape != (program.size,):
            raise ValueError(f"at must have shape ({program.size},), got {tuple(at.shape)}")
        self.program, self.subset, self.at = program, subset, at

    def whole(self, vector: Tensor) -> Tensor:
        """The vector (..., P) with ``vector`` (..., p) at the chosen numbers."""
        if self.subset is None or self.at is None:
            return vector
        return self.subset.put(self.at.to(vector), vector)

    def chosen(self, vector: Tensor) -> Tensor:
        return vector if self.subset is None else self.subset.take(vector)

    def log_density(self, vector: Tensor) -> Tensor:
        return self.program.log_density(self.whole(vector))

    def log_density_terms(self, vector: Tensor) -> dict[str, Tensor]:
        return self.program.log_density_terms(self.whole(vector))

    def constrain(self, vectors: Tensor) -> dict[str, Tensor]:
        """Latents at vectors (..., p); sites that are fixed are expanded, not copied."""
        layout = self.program.layout
        if self.subset is None or self.at is None:
            return layout.constrain(vectors)[0]
        fixed = layout.unflatten(self.at.to(vectors))
        result = {}
        for name, latent in layout.latents.items():
            value = fixed[name].expand(*vectors.shape[:-1], *fixed[name].shape)
            if name in self.subset.parts:
                part, entries = vectors[..., self.subset.parts[name]], self.subset.chosen[name]
                if entries is not None:
                    flat = fixed[name].reshape(-1).expand(*vectors.shape[:-1], -1).clone()
                    flat[..., entries.to(flat.device)] = part
                    part = flat
                value = part.reshape(value.shape)
            result[name] = value if latent.transform is None else latent.transform(value)
        return result


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Torch's random numbers follow ``seed`` inside; the caller's go on as before after."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def _runner(backend: str) -> Callable[[Target, Tensor, Settings], Chains]:
    if backend == "pyro":
        from pyro_bdl.mcmc import pyro_backend

        return pyro_backend.run
    from pyro_bdl.mcmc import numpyro_backend

    return numpyro_backend.run


@torch.no_grad()
def _as_samples(restriction: _Restriction, chains: Chains, info: dict[str, Any]) -> Samples:
    latents = restriction.constrain(chains.vectors)
    stats = dict(chains.stats)
    stats["diverging"] = stats["diverging"].bool()
    return Samples(latents, stats, info)


def _require_all_data(program: Program) -> None:
    for name, (size, present) in program.plates.items():
        if present < size:
            raise ValueError(
                f"the plate '{name}' stands for {size} data but holds {present}: MCMC needs all "
                "data in one call, without subsampling"
            )


def _starting_vectors(restriction: _Restriction, init: Any, num_chains: int) -> Tensor:
    """Starting points (chains, p) at which the log density and its gradient are finite."""
    vectors = []
    for chain in range(num_chains):
        for _ in range(_ATTEMPTS):
            vector = restriction.chosen(_proposed_start(restriction.program, init, chain))
            if _is_usable(restriction, vector):
                vectors.append(vector)
                break
        else:
            raise ValueError(
                f"no starting point with a finite log density was found from init={init!r}: "
                "start from a trained guide (init=guide), or check the program's data"
            )
    return torch.stack(vectors)


def _proposed_start(program: Program, init: Any, chain: int) -> Tensor:
    latents: dict[str, Any]
    if isinstance(init, str):
        if init == "prior":
            trace = prune_subsample_sites(trace_once(program.model, program.args, program.kwargs))
            latents = {name: trace.nodes[name]["value"] for name in program.latents}
        elif init == "network":
            from pyro.infer.autoguide.initialization import InitMessenger

            from pyro_bdl.init import init_to_network

            started = InitMessenger(init_to_network)(program.model)
            latents = Program(started, *program.args, **program.kwargs).initial
        else:
            raise ValueError(
                f"init must be 'prior', 'network', a guide, Samples or a dict, got '{init}'"
            )
    elif isinstance(init, Mapping):
        latents = dict(init)
    else:
        draws = latent_draws(init, 1 if chain == 0 else chain + 1, *program.args, **program.kwargs)
        latents = {name: value[-1] for name, value in draws.items()}
    missing = [name for name in program.latents if name not in latents]
    if missing:
        raise ValueError(f"init has no value for the latent site '{missing[0]}'")
    reference = next(iter(program.latents.values()))
    return program.unconstrain(latents).detach().to(reference.device, reference.dtype)


def _is_usable(restriction: _Restriction, vector: Tensor) -> bool:
    gradient, value = torch.func.grad_and_value(restriction.log_density)(vector)
    return bool(torch.isfinite(value) & torch.isfinite(gradient).all())


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got '{value}'")
    return value


def _at_least(name: str, value: int, least: int) -> int:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value

"""NumPyro's HMC and NUTS on a Pyro program that is translated to JAX."""

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpyro.infer import HMC, NUTS
from torch import Tensor

from pyro_bdl.errors import BdlWarning, MissingOperatorError
from pyro_bdl.mcmc.chains import Chains, Settings, Target, progress_bar, stack_chains
from pyro_bdl.mcmc.jax.translate import to_jax
from pyro_bdl.utils.interrupts import deferred_interrupt

# The number of iterations between two checks of clock and keyboard is chosen to take about this
# long.
_SECONDS_PER_BLOCK = 0.5
_MOST_PER_BLOCK = 64
_PROCESS = os.getpid()  # the process that has JAX's threads


def run(target: Target, start: Tensor, settings: Settings) -> Chains:
    """Sample ``target`` from the starting vectors (chains, P).

    :raises RuntimeError: in a process that was forked after JAX was used, or without a device.
    """
    _check_process()
    _check_device(start.device)
    with deferred_interrupt() as stop, jax.enable_x64(start.dtype == torch.float64):
        log_density = _translated(target, start[0])
        _raise_if_stopped(stop)
        kernel = _kernel(lambda vector: -log_density(vector), settings)
        starts = jnp.asarray(start.detach().cpu().numpy())
        keys = jax.random.split(jax.random.PRNGKey(settings.seed), len(start))
        if settings.chain_method == "vectorized" and len(start) > 1:
            chains = _Chain(kernel, keys, starts, settings).run(stop)
        else:
            chains = _one_by_one(kernel, keys, starts, settings, stop)
    chains.interrupted |= stop.is_set()  # Ctrl-C during the last block
    chains.vectors = chains.vectors.to(start)
    chains.stats = {name: value.to(start.device) for name, value in chains.stats.items()}
    return chains


def _check_process() -> None:
    if os.getpid() != _PROCESS:
        raise RuntimeError(
            "this process was forked from one in which JAX was used and lacks JAX's threads, so "
            "that JAX would wait forever: start processes with "
            "multiprocessing.get_context('spawn'), or use backend='pyro'"
        )


def _check_device(device: torch.device) -> None:
    try:
        platform = jax.default_backend()
    except RuntimeError as error:
        raise RuntimeError(
            f"JAX has no device to run on ({str(error).splitlines()[0]}): install JAX for the "
            "platform, unset JAX_PLATFORMS, or use backend='pyro'"
        ) from error
    if platform == "cpu" and device.type != "cpu":
        warnings.warn(
            f"the program is on '{device}', but JAX is installed for the CPU only: the chains run "
            "on the CPU; install JAX for the accelerator, or use backend='pyro'",
            BdlWarning,
            stacklevel=4,
        )


def _raise_if_stopped(stop: threading.Event) -> None:
    if stop.is_set():
        raise KeyboardInterrupt


def _translated(target: Target, example: Tensor) -> Any:
    try:
        log_density: Any = to_jax(target.log_density, example)
        if log_density.detaches and not _has_gradient_of(target, log_density, example):
            return to_jax(target.log_density, example, through_detach=True)
        return log_density
    except MissingOperatorError as error:
        site = _site_of(error.op, target, example)
        if site is None:
            raise
        raise MissingOperatorError(f"site '{site}': {error}", op=error.op, site=site) from error


def _has_gradient_of(target: Target, log_density: Any, point: Tensor) -> bool:
    """Return whether torch gives the same gradient of the density.

    A ``detach`` in the program stops the gradient in torch and JAX; a ``detach`` that
    ``torch.autograd.grad`` leaves in the graph stops it in JAX only.
    """
    leaf = point.detach().requires_grad_()
    with torch.enable_grad():
        (expected,) = torch.autograd.grad(target.log_density(leaf), leaf)
    found = torch.tensor(
        np.asarray(jax.grad(log_density)(jnp.asarray(point.cpu().numpy()))), device="cpu"
    )
    slack = 1e-2 * expected.abs().max()
    return bool(((found.to(expected) - expected).abs() <= slack).all())


def _site_of(op: str, target: Target, example: Tensor) -> str | None:
    """The first site whose own density needs the operator."""
    for name in target.terms(example):
        try:
            to_jax(_term(target, name), example)
        except MissingOperatorError as error:
            if error.op == op:
                return name
    return None


def _term(target: Target, name: str) -> Callable[[Tensor], Tensor]:
    def density(vector: Tensor) -> Tensor:
        return target.terms(vector)[name]

    return density


def _kernel(potential: Any, settings: Settings) -> HMC:
    kernel = NUTS if settings.kernel == "nuts" else HMC
    return kernel(
        potential_fn=potential, dense_mass=settings.dense_mass, **settings.kernel_options()
    )


class _Chain:
    """One chain, or several in lockstep, run in blocks of iterations with progress in between.

    The number of iterations of a block is an argument of the compiled function, so that warm-up and
    sampling share one compilation.
    """

    def __init__(self, kernel: HMC, keys: jax.Array, starts: jax.Array, settings: Settings) -> None:
        self.settings = settings
        self.batched = starts.ndim == 2
        self.state = kernel.init(
            keys, settings.num_warmup, init_params=starts, model_args=(), model_kwargs={}
        )
        self.advance = jax.jit(partial(_advance, kernel))
        self.collected: list[dict[str, np.ndarray]] = []

    def run(self, stop: threading.Event, bar: Any = None) -> Chains:
        """Warm up and sample; Ctrl-C or the event ``stop`` ends it early with the draws so far."""
        settings = self.settings
        own = bar is None
        total = settings.num_warmup + settings.num_samples
        bar = bar if bar is not None else progress_bar(settings, total, settings.kernel.upper())
        interrupted = False
        try:
            self._iterate(settings.num_warmup, bar, stop, keep=False)
            self._iterate(settings.num_samples, bar, stop, keep=True)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            if own:
                bar.close()
        if not self.collected:
            raise KeyboardInterrupt
        return self._chains(interrupted)

    def _iterate(self, count: int, bar: Any, stop: threading.Event, *, keep: bool) -> None:
        block = 1
        while count > 0:
            _raise_if_stopped(stop)
            size = min(block, count)
            started = time.perf_counter()
            state, kept = self.advance(self.state, size)
            jax.block_until_ready(state)
            seconds = time.perf_counter() - started
            self.state = state
            if keep:
                self.collected.append({k: np.asarray(v)[:size] for k, v in kept.items()})
            bar.update(size)
            count -= size
            block = int(np.clip(size * _SECONDS_PER_BLOCK / seconds, 1, _MOST_PER_BLOCK))

    def _chains(self, interrupted: bool) -> Chains:
        joined = {
            name: np.concatenate([block[name] for block in self.collected])
            for name in self.collected[0]
        }
        if self.batched:
            joined = {name: np.moveaxis(value, 1, 0) for name, value in joined.items()}
        else:
            joined = {name: value[None] for name, value in joined.items()}
        tensors = {name: torch.from_numpy(np.array(value)) for name, value in joined.items()}
        return Chains(tensors.pop("vector"), tensors, interrupted)


def _advance(kernel: HMC, state: Any, count: Any) -> tuple[Any, dict[str, jax.Array]]:
    """Run ``count`` iterations; the first ``count`` rows of the result hold their draws."""
    first = _kept(state)
    buffer = jax.tree.map(lambda v: jnp.zeros((_MOST_PER_BLOCK, *v.shape), v.dtype), first)

    def body(i: Any, carry: Any) -> Any:
        state, buffer = carry
        state = kernel.sample(state, (), {})
        buffer = jax.tree.map(lambda rows, v: rows.at[i].set(v), buffer, _kept(state))
        return state, buffer

    return jax.lax.fori_loop(0, count, body, (state, buffer))


def _kept(state: Any) -> dict[str, jax.Array]:
    return {
        "vector": state.z,
        "potential_energy": state.potential_energy,
        "energy": state.energy,
        "num_steps": state.num_steps,
        "accept_prob": state.accept_prob,
        "step_size": state.adapt_state.step_size,
        "diverging": state.diverging,
    }


def _one_by_one(
    kernel: HMC, keys: jax.Array, starts: jax.Array, settings: Settings, stop: threading.Event
) -> Chains:
    """Run chains separately: one after the other, or in parallel on separate threads."""
    chains = [_Chain(kernel, key, start, settings) for key, start in zip(keys, starts, strict=True)]
    for chain in chains[1:]:
        chain.advance = chains[0].advance
    total = len(chains) * (settings.num_warmup + settings.num_samples)
    bar = progress_bar(settings, total, settings.kernel.upper())
    try:
        if settings.chain_method == "parallel" and len(chains) > 1:
            return _in_threads(chains, bar, stop)
        return _in_turn(chains, bar, stop)
    finally:
        bar.close()


def _in_turn(chains: list[_Chain], bar: Any, stop: threading.Event) -> Chains:
    results: list[Chains] = []
    for chain in chains:
        try:
            results.append(chain.run(stop, bar))
        except KeyboardInterrupt:
            if not results:
                raise
            results[-1].interrupted = True
        if results[-1].interrupted:
            break
    return stack_chains(results)


def _in_threads(chains: list[_Chain], bar: Any, stop: threading.Event) -> Chains:
    x64 = bool(jax.config.read("jax_enable_x64"))

    def run(chain: _Chain) -> Chains:
        with jax.enable_x64(x64):
            return chain.run(stop, bar)

    with ThreadPoolExecutor(len(chains)) as pool:
        running = [pool.submit(run, chain) for chain in chains]
        # A second Ctrl-C arrives in this thread only; an error of a chain arrives in its thread
        # only.
        with contextlib.suppress(KeyboardInterrupt):
            wait(running, return_when=FIRST_EXCEPTION)
        if not all(each.done() for each in running):
            stop.set()
        wait(running)
    results = []
    for each in running:
        try:
            results.append(each.result())
        except KeyboardInterrupt:  # before its first draw
            continue
    if not results:
        raise KeyboardInterrupt
    joined = stack_chains(results)
    joined.interrupted |= len(results) < len(chains)
    return joined

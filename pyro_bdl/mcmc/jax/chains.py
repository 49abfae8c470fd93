"""Chains of any JAX kernel: in lockstep, in threads or in turn, in blocks of iterations."""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from pyro_bdl.mcmc.chains import Chains, Settings, Target, progress_bar, stack_chains
from pyro_bdl.mcmc.jax.density import check_device, check_process, jax_density
from pyro_bdl.utils.interrupts import deferred_interrupt

# The number of iterations between two checks of clock and keyboard is chosen to take about this
# long.
_SECONDS_PER_BLOCK = 0.5
_MOST_PER_BLOCK = 64

Kept = dict[str, np.ndarray]


class Stage(NamedTuple):
    """Iterations of one kind.

    :param iterations: their number.
    :param keep: whether ``Kernel.kept`` of each iteration is collected.
    :param finish: called after the last iteration with the state and what was collected; returns
        the state of the next stage. Its arrays are numpy's and begin with an axis of chains, those
        collected with (chains, iterations).
    """

    iterations: int
    keep: bool
    finish: Callable[[Any, Kept], Any] | None = None


class Kernel(NamedTuple):
    """A Markov kernel in JAX. Each function takes one chain, or several with a leading axis.

    :param init: (keys, starts) -> state, a pytree of arrays with all random keys in it.
    :param step: state -> state after one iteration.
    :param kept: state -> name -> array: ``vector`` and the statistics of the draw.
    :param stages: the iterations; the draws are those of the last stage.
    :param hidden: names of ``kept`` that only ``Stage.finish`` reads.
    """

    init: Callable[[jax.Array, jax.Array], Any]
    step: Callable[[Any], Any]
    kept: Callable[[Any], dict[str, jax.Array]]
    stages: tuple[Stage, ...]
    hidden: tuple[str, ...] = ()


def run(
    target: Target,
    start: Tensor,
    settings: Settings,
    make: Callable[[Callable[[jax.Array], jax.Array], Settings, int], Kernel],
) -> Chains:
    """Run chains of a kernel from the starting vectors (chains, P).

    :param make: (log density, settings, P) -> the kernel.
    :raises RuntimeError: in a process that was forked after JAX was used, or without a device.
    """
    check_process()
    check_device(start.device)
    with deferred_interrupt() as stop, jax.enable_x64(start.dtype == torch.float64):
        log_density = jax_density(target, start[0])
        _raise_if_stopped(stop)
        kernel = make(log_density, settings, start.shape[-1])
        starts = jnp.asarray(start.detach().cpu().numpy())
        keys = jax.random.split(jax.random.PRNGKey(settings.seed), len(start))
        if settings.chain_method == "vectorized" and len(start) > 1:
            chains = Chain(kernel, keys, starts, settings).run(stop)
        else:
            chains = _one_by_one(kernel, keys, starts, settings, stop)
    chains.interrupted |= stop.is_set()  # Ctrl-C during the last block
    chains.vectors = chains.vectors.to(start)
    chains.stats = {name: value.to(start.device) for name, value in chains.stats.items()}
    return chains


def _raise_if_stopped(stop: threading.Event) -> None:
    if stop.is_set():
        raise KeyboardInterrupt


class Chain:
    """One chain, or several in lockstep, run in blocks of iterations with progress in between.

    The number of iterations of a block is an argument of the compiled function, so that all stages
    share one compilation.
    """

    def __init__(
        self, kernel: Kernel, keys: jax.Array, starts: jax.Array, settings: Settings
    ) -> None:
        self.kernel, self.settings = kernel, settings
        self.batched = starts.ndim == 2
        self.state = kernel.init(keys, starts)
        self.advance = jax.jit(partial(_advance, kernel))
        self.collected: list[Kept] = []

    def run(self, stop: threading.Event, bar: Any = None) -> Chains:
        """Run all stages; Ctrl-C or the event ``stop`` ends the last with the draws so far."""
        own = bar is None
        total = sum(stage.iterations for stage in self.kernel.stages)
        if own:
            bar = progress_bar(self.settings, total, self.settings.kernel.upper())
        interrupted = False
        try:
            for stage in self.kernel.stages:
                self._run_stage(stage, bar, stop)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            if own:
                bar.close()
        if not self.collected:
            raise KeyboardInterrupt
        return self._chains(interrupted)

    def _run_stage(self, stage: Stage, bar: Any, stop: threading.Event) -> None:
        self.collected = []
        count, block = stage.iterations, 1
        hidden = () if stage.finish is not None else self.kernel.hidden
        try:
            while count > 0:
                _raise_if_stopped(stop)
                size = min(block, count)
                started = time.perf_counter()
                state, kept = self.advance(self.state, size)
                jax.block_until_ready(state)
                seconds = time.perf_counter() - started
                self.state = state
                if stage.keep:
                    self.collected.append(
                        {k: np.asarray(v)[:size].copy() for k, v in kept.items() if k not in hidden}
                    )
                bar.update(size)
                count -= size
                block = int(np.clip(size * _SECONDS_PER_BLOCK / seconds, 1, _MOST_PER_BLOCK))
        except KeyboardInterrupt:
            if stage is not self.kernel.stages[-1]:
                self.collected = []  # of the warm-up
            raise
        if stage.finish is not None:
            self._finish(stage.finish)

    def _finish(self, finish: Callable[[Any, Kept], Any]) -> None:
        """Let the end of a stage change the state."""
        outer = (lambda v: np.asarray(v)) if self.batched else (lambda v: np.asarray(v)[None])
        inner = (lambda v: v) if self.batched else (lambda v: v[0])
        state = finish(jax.tree.map(outer, self.state), self._joined())
        self.state = jax.tree.map(
            lambda new, old: jnp.asarray(inner(new), old.dtype), state, self.state
        )

    def _joined(self) -> Kept:
        """All that was collected, (chains, iterations, ...)."""
        if not self.collected:
            return {}
        names = self.collected[0]
        joined = {name: np.concatenate([block[name] for block in self.collected]) for name in names}
        if self.batched:
            return {name: np.moveaxis(value, 1, 0) for name, value in joined.items()}
        return {name: value[None] for name, value in joined.items()}

    def _chains(self, interrupted: bool) -> Chains:
        tensors = {name: torch.from_numpy(np.array(v)) for name, v in self._joined().items()}
        return Chains(tensors.pop("vector"), tensors, interrupted)


def _advance(kernel: Kernel, state: Any, count: Any) -> tuple[Any, dict[str, jax.Array]]:
    """Run ``count`` iterations; the first ``count`` rows of the result hold their draws."""
    first = kernel.kept(state)
    buffer = jax.tree.map(lambda v: jnp.zeros((_MOST_PER_BLOCK, *v.shape), v.dtype), first)

    def body(i: Any, carry: Any) -> Any:
        state, buffer = carry
        state = kernel.step(state)
        buffer = jax.tree.map(lambda rows, v: rows.at[i].set(v), buffer, kernel.kept(state))
        return state, buffer

    return jax.lax.fori_loop(0, count, body, (state, buffer))


def _one_by_one(
    kernel: Kernel, keys: jax.Array, starts: jax.Array, settings: Settings, stop: threading.Event
) -> Chains:
    """Run chains separately: one after the other, or in parallel on separate threads."""
    chains = [Chain(kernel, key, start, settings) for key, start in zip(keys, starts, strict=True)]
    for chain in chains[1:]:
        chain.advance = chains[0].advance
    total = len(chains) * sum(stage.iterations for stage in kernel.stages)
    bar = progress_bar(settings, total, settings.kernel.upper())
    try:
        if settings.chain_method == "parallel" and len(chains) > 1:
            return _in_threads(chains, bar, stop)
        return _in_turn(chains, bar, stop)
    finally:
        bar.close()


def _in_turn(chains: list[Chain], bar: Any, stop: threading.Event) -> Chains:
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


def _in_threads(chains: list[Chain], bar: Any, stop: threading.Event) -> Chains:
    x64 = bool(jax.config.read("jax_enable_x64"))

    def run(chain: Chain) -> Chains:
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

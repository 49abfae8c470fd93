"""Chains of any JAX kernel: in lockstep, in threads or in turn, in blocks of iterations."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from pyro_bdl.mcmc.chains import Chains, Settings, Target, progress_bar, stack_chains
from pyro_bdl.mcmc.checkpoint import Journal, Kept
from pyro_bdl.mcmc.jax.density import check_device, check_process, jax_density
from pyro_bdl.utils.fingerprint import require_same
from pyro_bdl.utils.interrupts import deferred_interrupt

# The number of iterations between two checks of clock and keyboard is chosen to take about this
# long.
_SECONDS_PER_BLOCK = 0.5
_MOST_PER_BLOCK = 64
_SECONDS_PER_WRITE = 5.0  # of a checkpoint


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
    state: Mapping[str, Tensor] | None = None,
) -> Chains:
    """Run chains of a kernel from the starting vectors (chains, P).

    :param make: (log density, settings, P) -> the kernel.
    :param state: ``Chains.state`` of an earlier run with these settings, from whose end the chains
        go on without a warm-up.
    :raises RuntimeError: in a process that was forked after JAX was used, or without a device.
    :raises ValueError: for a checkpoint or state of another run.
    """
    check_process()
    check_device(start.device)
    with deferred_interrupt() as stop, jax.enable_x64(start.dtype == torch.float64):
        log_density = jax_density(target, start[0])
        _raise_if_stopped(stop)
        kernel = make(log_density, settings, start.shape[-1])
        starts = jnp.asarray(start.detach().cpu().numpy())
        keys = jax.random.split(jax.random.PRNGKey(settings.seed), len(start))
        advance = jax.jit(partial(_advance, kernel))
        if settings.chain_method == "vectorized" and len(start) > 1:
            journal = _journal(settings, log_density, starts)
            chain = Chain(kernel, advance, keys, starts, settings, journal, state)
            if state is not None:
                chain.require_density(log_density)
            chains = chain.run(stop)
        else:
            chains = _one_by_one(kernel, advance, log_density, keys, starts, settings, state, stop)
    chains.interrupted |= stop.is_set()  # Ctrl-C during the last block
    chains.vectors = chains.vectors.to(start)
    chains.stats = {name: value.to(start.device) for name, value in chains.stats.items()}
    return chains


def _raise_if_stopped(stop: threading.Event) -> None:
    if stop.is_set():
        raise KeyboardInterrupt


def _journal(
    settings: Settings, log_density: Callable, starts: jax.Array, chain: int | None = None
) -> Journal | None:
    if settings.checkpoint is None:
        return None
    folder = Path(settings.checkpoint)
    values = jax.vmap(log_density)(starts) if starts.ndim == 2 else log_density(starts)
    identity = {"starts": np.asarray(starts), "log densities": np.asarray(values)}
    if settings.inverse_mass is not None:
        identity["inverse_mass"] = settings.inverse_mass
    where = folder if chain is None else folder / f"chain-{chain}"
    return Journal(where, settings.as_json(), identity)


class Chain:
    """One chain, or several in lockstep, run in blocks of iterations with progress in between.

    The number of iterations of a block is an argument of the compiled function, so that all stages
    share one compilation. Single chains take turns on the devices, if there are several.

    :param advance: ``_advance`` of the kernel, compiled; the same for all chains.
    :param journal: where the chain is written as it goes, and read from if it is there.
    :param state: the state from which the draws go on, without the earlier stages.
    :param number: of a single chain, which picks its device.
    """

    def __init__(
        self,
        kernel: Kernel,
        advance: Callable[[Any, int], tuple[Any, dict[str, jax.Array]]],
        keys: jax.Array,
        starts: jax.Array,
        settings: Settings,
        journal: Journal | None = None,
        state: Mapping[str, Tensor] | None = None,
        number: int | None = None,
    ) -> None:
        self.kernel, self.settings, self.journal = kernel, settings, journal
        devices = jax.devices()
        self.device = None  # the default
        if number is not None and len(devices) > 1:
            self.device = devices[number % len(devices)]
        self.batched = starts.ndim == 2
        with self._on_device():
            self.state = kernel.init(keys, starts)
        self.advance = advance
        self.collected: list[Kept] = []
        self.stage = self.done = self.written = 0
        self.last_write = time.perf_counter()
        if state is not None:
            self.stage = len(kernel.stages) - 1
            self._take({name: value.numpy() for name, value in state.items()})
        restored = None if journal is None else journal.restore()
        if restored is not None:
            self.stage, self.done = restored.stage, restored.done
            self.collected = restored.blocks
            self.written = len(restored.blocks)
            self._take(restored.leaves)

    def _on_device(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.device is None else jax.default_device(self.device)

    def _leaves(self) -> Kept:
        """The arrays of the state, by path."""
        found = jax.tree_util.tree_flatten_with_path(self.state)[0]
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in found}

    def _take(self, leaves: Mapping[str, np.ndarray]) -> None:
        """Replace the arrays of the state.

        :raises ValueError: for those of another kernel, or for another number of chains.
        """
        own = self._leaves()
        if own.keys() != leaves.keys() or any(own[k].shape != leaves[k].shape for k in own):
            raise ValueError(
                "the state of the chains is of another kernel, program or number of chains"
            )
        arrays = [jnp.asarray(leaves[name], own[name].dtype) for name in own]
        self.state = jax.tree.unflatten(jax.tree.structure(self.state), arrays)

    def require_density(self, log_density: Callable[[jax.Array], jax.Array]) -> None:
        """Check that the state is of chains of this log density.

        :raises ValueError: if the last draw has another one.
        """
        last = self.kernel.kept(self.state)
        values = (jax.vmap(log_density) if self.batched else log_density)(last["vector"])
        name = "log densities at the last draws"
        there = {name: -np.asarray(last["potential_energy"])}
        require_same("the chain", there, {name: np.asarray(values)})

    def run(self, stop: threading.Event, bar: Any = None) -> Chains:
        """Run all stages; Ctrl-C or the event ``stop`` ends the last with the draws so far."""
        own = bar is None
        stages = self.kernel.stages
        if own:
            total = sum(stage.iterations for stage in stages)
            bar = progress_bar(self.settings, total, self.settings.kernel.upper())
        interrupted = False
        bar.update(sum(stage.iterations for stage in stages[: self.stage]) + self.done)
        try:
            while True:
                with self._on_device():
                    self._run_stage(stages[self.stage], bar, stop)
                if self.stage == len(stages) - 1:
                    break
                self.stage, self.done = self.stage + 1, 0
                self.collected, self.written = [], 0
        except KeyboardInterrupt:
            interrupted = True
        finally:
            if own:
                bar.close()
        if self.stage < len(stages) - 1 or not self.collected:
            raise KeyboardInterrupt
        return self._chains(interrupted)

    def _run_stage(self, stage: Stage, bar: Any, stop: threading.Event) -> None:
        block = 1
        hidden = self.kernel.hidden
        try:
            while self.done < stage.iterations:
                _raise_if_stopped(stop)
                size = min(block, stage.iterations - self.done)
                started = time.perf_counter()
                state, kept = self.advance(self.state, size)
                jax.block_until_ready(state)
                seconds = time.perf_counter() - started
                if stage.keep:  # a stage with an end reads what is hidden, the last one the rest
                    names = [k for k in kept if (k in hidden) == (stage.finish is not None)]
                    self.collected.append({k: np.asarray(kept[k])[:size].copy() for k in names})
                self.state, self.done = state, self.done + size
                bar.update(size)
                if time.perf_counter() - self.last_write >= _SECONDS_PER_WRITE:
                    self._write()
                block = int(np.clip(size * _SECONDS_PER_BLOCK / seconds, 1, _MOST_PER_BLOCK))
        finally:
            self._write()
        if stage.finish is not None:
            self._finish(stage.finish)

    def _write(self) -> None:
        if self.journal is None:
            return
        new = self.collected[self.written :]
        block = {name: np.concatenate([b[name] for b in new]) for name in new[0]} if new else None
        self.journal.write(self.stage, self.done, self._leaves(), block)
        self.written, self.last_write = len(self.collected), time.perf_counter()

    def _finish(self, finish: Callable[[Any, Kept], Any]) -> None:
        """Let the end of a stage change the state."""
        outer = (lambda v: np.asarray(v)) if self.batched else (lambda v: np.asarray(v)[None])
        inner = (lambda v: v) if self.batched else (lambda v: v[0])
        state = finish(jax.tree.map(outer, self.state), self._joined())
        self.state = jax.tree.map(
            lambda new, old: jnp.asarray(inner(new), old.dtype), state, self.state
        )

    def _joined(self) -> Kept:
        """All that was collected, (chains, iterations, ...); the blocks are given up."""
        if not self.collected:
            return {}
        names = list(self.collected[0])
        joined = {
            name: np.concatenate([block.pop(name) for block in self.collected]) for name in names
        }
        if self.batched:
            return {name: np.moveaxis(value, 1, 0) for name, value in joined.items()}
        return {name: value[None] for name, value in joined.items()}

    def _chains(self, interrupted: bool) -> Chains:
        most = self.settings.num_samples
        joined = self._joined()
        tensors = {  # one copy at a time, since the draws may fill the memory
            name: torch.from_numpy(np.array(joined.pop(name)[:, :most])) for name in list(joined)
        }
        state = {}
        if self.done <= most:  # a checkpoint may hold more draws than are asked for
            for name, value in self._leaves().items():
                value = value if self.batched else value[None]
                value = value.astype(np.int64) if value.dtype == np.uint32 else np.array(value)
                state[name] = torch.from_numpy(value)
        return Chains(tensors.pop("vector"), tensors, interrupted, state)


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
    kernel: Kernel,
    advance: Callable,
    log_density: Callable,
    keys: jax.Array,
    starts: jax.Array,
    settings: Settings,
    state: Mapping[str, Tensor] | None,
    stop: threading.Event,
) -> Chains:
    """Run chains separately: one after the other, or in parallel on separate threads."""
    chains = []
    for i, (key, start) in enumerate(zip(keys, starts, strict=True)):
        journal = _journal(settings, log_density, start, i)
        own = None if state is None else {name: value[i] for name, value in state.items()}
        chains.append(Chain(kernel, advance, key, start, settings, journal, own, i))
        if state is not None:
            chains[-1].require_density(log_density)
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

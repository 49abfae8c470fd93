"""Chains of any kernel in JAX: in threads or in lockstep, in blocks of iterations.

All that the next iteration needs is in a chain's state, random keys included. Chains therefore go
on with the same draws from what a ``Journal`` holds, or from where an earlier call left them.
"""

import contextlib
import copy
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from pyro_bdl.errors import warn
from pyro_bdl.mcmc.chains import Chains, Journal, Plan, progress_bar, stack_chains
from pyro_bdl.mcmc.kernels import Kernel
from pyro_bdl.mcmc.starts import Restriction
from pyro_bdl.program.jax_density import jax_density
from pyro_bdl.tracing.jax.translate import JaxFunction, shared

# The number of iterations between two checks of clock and keyboard is chosen to take about this
# long.
_SECONDS_PER_BLOCK = 0.5
_MOST_PER_BLOCK = 64
_SECONDS_PER_WRITE = 5.0  # of a checkpoint
Arrays = dict[str, np.ndarray]
TRACE = "trace"  # the entry of a draw that is collected for ``Stage.finish``, and no statistic


class Stage(NamedTuple):
    """Iterations of a warm-up.

    :param iterations: their number.
    :param finish: (state, trace) -> the state after the last of them. The arrays are numpy's and
        begin with an axis of chains, the trace with (chains, iterations).
    :param traced: whether there is a trace.
    """

    iterations: int
    finish: Callable[[Any, Any], Any] | None = None
    traced: bool = False


class Transition(NamedTuple):
    """A Markov kernel in JAX, of one chain.

    :param init: (key, start (P,)) -> state, a pytree of arrays.
    :param step: state -> state after one iteration, and the draw there, name -> array: ``vector``,
        ``TRACE`` where a stage is traced, and statistics. Warnings and costs read ``num_steps``
        (gradients), ``step_size`` and ``diverging``, diagnostics ``energy``, where there are such.
    :param warmup: the stages before the draws.
    """

    init: Callable[[jax.Array, jax.Array], Any]
    step: Callable[[Any], tuple[Any, dict[str, jax.Array]]]
    warmup: tuple[Stage, ...]


def run(target: Restriction, start: Tensor, kernel: Kernel, plan: Plan) -> Chains:
    """Run chains from the starting vectors (chains, P).

    :raises ValueError: for a checkpoint of another run.
    """
    warn_of_another_device(start.device)
    method = plan.chain_method or ("parallel" if jax.default_backend() == "cpu" else "vectorized")
    with deferred_interrupt() as stop, jax.enable_x64(start.dtype == torch.float64):
        log_density = jax_density(target.log_density, target.log_density_terms, start[0])
        _raise_if(stop)
    own, double = start, log_density.wide or start.dtype == torch.float64
    if double and start.dtype != torch.float64:  # chains in single precision need 64 bits inside
        start, log_density = start.double(), log_density.in_double()
    with deferred_interrupt() as stop, jax.enable_x64(double):
        lockstep = method == "vectorized" and len(start) > 1
        compiled = _compiled(log_density, kernel, plan, start, lockstep)
        held = log_density.constants(), jnp.asarray(np.int64(plan.seed))
        init, advance = (partial(function, held) for function in compiled)
        warmup = kernel.with_metric(log_density, plan, start.shape[-1]).warmup
        starts = jnp.asarray(start.detach().cpu().numpy())
        keys = jax.random.split(jax.random.PRNGKey(plan.seed), len(start))
        identity = kernel.options() | {
            "kernel": kernel.name, "num_warmup": plan.num_warmup, "seed": plan.seed,
            "chain_method": method,
        }  # fmt: skip
        identity["metric"] = np.zeros(0) if kernel.inverse_mass is None else kernel.inverse_mass

        def chain(key: jax.Array, start: jax.Array, number: int | None) -> Chain:
            journal = None
            if plan.checkpoint is not None:
                values = np.array(jax.vmap(log_density)(jnp.atleast_2d(start)))
                folder = plan.checkpoint / ("" if number is None else f"chain-{number}")
                own = {"starts": np.array(start), "log densities": values}
                journal = Journal(folder, identity | own)
            return Chain(init, advance, warmup, key, start, journal, number)

        if lockstep:
            chains = [chain(keys, starts, None)]
        else:
            pairs = zip(keys, starts, strict=True)
            chains = [chain(*pair, number) for number, pair in enumerate(pairs)]

    def drawn(chains: list[Chain], count: int) -> Chains:
        with deferred_interrupt() as stop, jax.enable_x64(double):
            joined = _in_threads(chains, count, plan.progress, kernel.name, stop)
        joined.interrupted |= stop.is_set()  # Ctrl-C during the last block
        joined.vectors = joined.vectors.to(own)
        joined.stats = {name: value.to(start.device) for name, value in joined.stats.items()}
        if all(chain.done == joined.vectors.shape[1] for chain in chains):
            joined.resume = lambda count: drawn([chain.from_here() for chain in chains], count)
        return joined

    return drawn(chains, plan.num_samples)


def _compiled(
    log_density: JaxFunction, kernel: Kernel, plan: Plan, start: Tensor, lockstep: bool
) -> tuple[Callable, Callable]:
    """``Transition.init`` and ``_advance``, compiled, whose first argument is what the log density
    closes over, with the seed: chains of other data or seeds share them.

    :param start: (chains, P).
    """
    size, pure = start.shape[-1], log_density.pure

    def transition(held: tuple[list[jax.Array], Any]) -> Transition:
        constants, seed = held
        return kernel.with_metric(partial(pure, constants), plan._replace(seed=seed), size)

    def init(held: tuple, *starts: Any) -> Any:
        own = transition(held).init
        return (jax.vmap(own) if lockstep else own)(*starts)

    def advance(held: tuple, state: Any, count: Any) -> Any:
        own = transition(held).step
        return _advance(jax.vmap(own) if lockstep else own, state, count)

    metric = kernel.inverse_mass
    options = tuple(sorted((name, repr(value)) for name, value in kernel.options().items()))
    own = None if metric is None else (metric.shape, np.asarray(metric).tobytes())
    key = log_density.signature, kernel.name, options, own, plan.num_warmup, size, lockstep
    return shared(key, lambda: (jax.jit(init), jax.jit(advance)))


def warn_of_another_device(device: torch.device) -> None:
    if jax.default_backend() == "cpu" and device.type != "cpu":
        warn(
            f"the program is on '{device}', but JAX is installed for the CPU only: the chains run "
            "on the CPU; install JAX for the accelerator, or use backend='pyro'",
            "jax-on-the-cpu",
        )


def _raise_if(stop: threading.Event) -> None:
    if stop.is_set():
        raise KeyboardInterrupt


def _advance(step: Callable, state: Any, count: Any) -> tuple[Any, dict[str, jax.Array]]:
    """Run ``count`` iterations; the first ``count`` rows of the result hold their draws."""
    _, shapes = jax.eval_shape(step, state)
    rows = jax.tree.map(lambda v: jnp.zeros((_MOST_PER_BLOCK, *v.shape), v.dtype), shapes)

    def body(i: Any, carry: Any) -> Any:
        state, rows = carry
        state, draw = step(state)
        return state, jax.tree.map(lambda rows, v: rows.at[i].set(v), rows, draw)

    return jax.lax.fori_loop(0, count, body, (state, rows))


class Chain:
    """One chain, or several in lockstep.

    The number of iterations of a block is an argument of the compiled function, so that all stages
    share one compilation. Single chains take turns on the devices, if there are several.

    :param init: that of the transition, compiled.
    :param advance: ``_advance`` of its step, compiled; the same for all chains.
    :param warmup: the stages before the draws.
    :param journal: where the chain is written as it goes, and read from if it is there.
    :param number: of a single chain; None for several in lockstep.
    """

    def __init__(
        self,
        init: Callable[[jax.Array, jax.Array], Any],
        advance: Callable[[Any, int], tuple[Any, dict[str, jax.Array]]],
        warmup: tuple[Stage, ...],
        keys: jax.Array,
        starts: jax.Array,
        journal: Journal | None,
        number: int | None,
    ) -> None:
        self.warmup, self.advance, self.journal = warmup, advance, journal
        devices = jax.devices()
        self.batched = number is None
        self.device = None
        if number is not None and len(devices) > 1:
            self.device = devices[number % len(devices)]
        with self._on_device():
            self.state = init(keys, starts)
        self.stage = self.done = self.written = 0  # of the warm-up, iterations in it, blocks
        self.blocks: list[Arrays] = []
        self.last_write = time.perf_counter()
        restored = None if journal is None else journal.restore()
        if restored is not None:
            self.stage, self.done, self.blocks = restored.stage, restored.done, restored.blocks
            self.written = len(self.blocks)
            leaves = [
                jnp.asarray(restored.state[name], leaf.dtype).reshape(leaf.shape)
                for name, leaf in self._leaves().items()
            ]
            self.state = jax.tree.unflatten(jax.tree.structure(self.state), leaves)

    def from_here(self) -> "Chain":
        """A chain without draws that goes on from this one's state."""
        chain = copy.copy(self)
        chain.journal, chain.done, chain.written, chain.blocks = None, 0, 0, []
        return chain

    def run(self, num_samples: int, stop: threading.Event, bar: Any) -> Chains:
        """Warm up and draw; Ctrl-C or the event ``stop`` ends the drawing with the draws so far."""
        warmup, interrupted = self.warmup, False
        bar.update(sum(stage.iterations for stage in warmup[: self.stage]) + self.done)
        try:
            for stage in warmup[self.stage :]:
                self._iterate(stage.iterations, [TRACE] if stage.traced else [], stop, bar)
                if stage.finish is not None:
                    self._finish(stage.finish)
                self.stage, self.done, self.written, self.blocks = self.stage + 1, 0, 0, []
            self._iterate(num_samples, None, stop, bar)
        except KeyboardInterrupt:
            interrupted = True
        if self.stage < len(warmup) or not self.blocks:
            raise KeyboardInterrupt
        joined = self._joined()  # a checkpoint may hold more draws than are asked for
        tensors = {  # one copy at a time, since the draws may fill the memory
            name: torch.from_numpy(np.array(joined.pop(name)[:, :num_samples]))
            for name in list(joined)
        }
        return Chains(tensors.pop("vector"), tensors, interrupted)

    def _iterate(
        self, count: int, names: list[str] | None, stop: threading.Event, bar: Any
    ) -> None:
        """Move until there are ``count`` iterations of this stage, and collect these entries of
        their draws, by default all but the trace."""
        block = 1
        try:
            while self.done < count:
                _raise_if(stop)
                size = min(block, count - self.done)
                started = time.perf_counter()
                with self._on_device():
                    state, draws = self.advance(self.state, size)
                jax.block_until_ready(state)
                seconds = time.perf_counter() - started
                if names is None:
                    names = [name for name in draws if name != TRACE]
                if names:
                    self.blocks.append({k: np.asarray(draws[k])[:size].copy() for k in names})
                self.state, self.done = state, self.done + size
                bar.update(size)
                if time.perf_counter() - self.last_write >= _SECONDS_PER_WRITE:
                    self._write()
                block = int(np.clip(size * _SECONDS_PER_BLOCK / seconds, 1, _MOST_PER_BLOCK))
        finally:
            self._write()

    def _finish(self, finish: Callable[[Any, Any], Any]) -> None:
        """Let the end of a stage change the state."""
        outer = np.asarray if self.batched else lambda v: np.asarray(v)[None]
        inner = (lambda v: v) if self.batched else (lambda v: v[0])
        state = finish(jax.tree.map(outer, self.state), self._joined().get(TRACE))
        self.state = jax.tree.map(
            lambda new, old: jnp.asarray(inner(new), old.dtype), state, self.state
        )

    def _joined(self) -> Arrays:
        """All that was collected, (chains, iterations, ...); the blocks are given up."""
        joined = {
            name: np.concatenate([block.pop(name) for block in self.blocks])
            for name in list(self.blocks[0] if self.blocks else ())
        }
        if self.batched:
            return {name: np.moveaxis(value, 1, 0) for name, value in joined.items()}
        return {name: value[None] for name, value in joined.items()}

    def _write(self) -> None:
        if self.journal is None:
            return
        new = self.blocks[self.written :]
        block = {name: np.concatenate([b[name] for b in new]) for name in new[0]} if new else None
        self.journal.write(self.stage, self.done, self._leaves(), block)
        self.written, self.last_write = len(self.blocks), time.perf_counter()

    def _leaves(self) -> Arrays:
        """The arrays of the state, by path."""
        leaves = jax.tree_util.tree_flatten_with_path(self.state)[0]
        return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}

    def _on_device(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.device is None else jax.default_device(self.device)


def _in_threads(
    chains: list[Chain], count: int, progress: bool | None, name: str, stop: threading.Event
) -> Chains:
    """Run chains, each in a thread of its own if there are several; an error or a second Ctrl-C
    stops all of them."""
    double = bool(jax.config.read("jax_enable_x64"))
    warmup = sum(stage.iterations for stage in chains[0].warmup)
    bar = progress_bar(progress, len(chains) * (warmup + count), name.upper())

    def work(chain: Chain) -> Chains:
        with jax.enable_x64(double):
            return chain.run(count, stop, bar)

    if len(chains) == 1:
        with contextlib.closing(bar):
            return work(chains[0])
    with ThreadPoolExecutor(len(chains)) as pool:
        running = [pool.submit(work, chain) for chain in chains]
        # A second Ctrl-C arrives in this thread only; an error of a chain arrives in its thread
        # only.
        with contextlib.suppress(KeyboardInterrupt):
            wait(running, return_when=FIRST_EXCEPTION)
        if not all(future.done() for future in running):
            stop.set()
        wait(running)
    bar.close()
    results = []
    for future in running:
        with contextlib.suppress(KeyboardInterrupt):  # before its first draw
            results.append(future.result())
    if not results:
        raise KeyboardInterrupt
    joined = stack_chains(results)
    joined.interrupted |= len(results) < len(chains)
    return joined


@contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets instead of raising; a second Ctrl-C raises as
    usual.

    A KeyboardInterrupt is lost if it arrives inside a callback of the garbage collector, and JAX
    has such a callback. It could also leave a JAX computation running while its inputs are freed.
    Signals arrive in the main thread only; in other threads the event is never set.
    """
    event = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield event
        return
    react = before

    def handler(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            react(number, frame)
        event.set()

    signal.signal(signal.SIGINT, handler)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)

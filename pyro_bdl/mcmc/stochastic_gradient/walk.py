"""Chains that move by gradients of minibatches, and the draws that they keep."""

import itertools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_bdl.errors import MissingOperatorError, UnsupportedProgramError
from pyro_bdl.mcmc.chains import Chains, Journal
from pyro_bdl.mcmc.starts import Restriction
from pyro_bdl.mcmc.stochastic_gradient.kernels import StochasticKernel
from pyro_bdl.mcmc.stochastic_gradient.minibatches import MinibatchSource
from pyro_bdl.mcmc.stochastic_gradient.scores import Scores
from pyro_bdl.program.batches import Batch, Stream
from pyro_bdl.program.check import check_finite
from pyro_bdl.utils.progress import is_silent
from pyro_bdl.utils.random_state import set_torch_states, torch_states
from pyro_bdl.utils.trees import tree_map

if TYPE_CHECKING:
    from pyro_bdl.mcmc.stochastic_gradient.jax_steps import CompiledSteps

_REFRESH = 0.5  # seconds between two updates of the progress bar
_SOUND_EVERY = 20  # steps between two positions to which a diverged chain may go back
_SMALLEST = 1e-9  # factor of the step size below which it is not halved again
_SECONDS_PER_WRITE = 5.0  # of a checkpoint
_WORTH_TRACING = 500  # the number of steps from which tracing saves time
_WORTH_COMPILING = 5000  # and a compiled loop in JAX
_MOST_EXPLORING = 1000  # times the steps that sample


class Point(NamedTuple):
    """Positions (chains, P), and the log density (chains,) and its gradient (chains, P) there."""

    position: Tensor
    log_density: Tensor
    gradient: Tensor


class Walk:
    """Chains of stochastic-gradient MCMC, moved by ``run``.

    :param start: the initial positions (chains, p).
    :param journal: where the chains are written as they go, and read from if they are there.
    :ivar factor: what is left of the step size after divergences in the warm-up.
    :ivar failure: why the run ended early by itself, as text; None if it did not.
    """

    def __init__(
        self,
        kernel: StochasticKernel,
        restriction: Restriction,
        batches: MinibatchSource,
        start: Tensor,
        journal: Journal | None = None,
    ) -> None:
        self.kernel, self.restriction, self.start = kernel, restriction, start
        self.journal = journal
        self.batches, self.stream = batches, Stream(batches.one_pass, stated=batches.stated)
        self.scores = Scores(restriction.log_density)
        self.factor = 1.0
        self.failure: str | None = None
        self.draws: dict[str, Tensor] = {}  # (chains, draws, ...)
        self.kept = self.steps = self.written = 0

    def run(self, num_warmup: int, num_samples: int, progress: bool | None) -> Chains:
        """Move the chains until there are ``num_samples`` draws; Ctrl-C ends it with those so far.

        :raises KeyboardInterrupt: if Ctrl-C comes before the first draw.
        """
        ends = kept_steps(self.kernel, num_warmup, num_samples)
        self.scores.traced = ends[-1] >= _WORTH_TRACING
        self.loop = self._compiled() if ends[-1] >= _WORTH_COMPILING else None
        interrupted = False
        bar = tqdm(
            total=ends[-1], desc="SG-MCMC", disable=is_silent(progress), leave=False,
            mininterval=_REFRESH, delay=1,
        )  # fmt: skip
        with bar:
            try:
                self._begin(num_samples)
                bar.update(min(self.steps, ends[-1]))
                self.failure = self._move(ends, num_warmup, bar)
            except KeyboardInterrupt:
                if not self.kept:
                    raise
                interrupted = True
        draws = {name: value[:, : self.kept] for name, value in self.draws.items()}
        empty = self.start.new_empty(len(self.start), 0, self.start.shape[-1])
        return Chains(draws.pop("vectors", empty), draws, interrupted)

    def _begin(self, num_samples: int) -> None:
        """Put the chains at their start, or where the journal left them."""
        self.num_samples = num_samples
        self.state = self.kernel.init(self.start.clone())
        restored = None if self.journal is None else self.journal.restore()
        if restored is None:
            self.point, _ = self._evaluated(self.state.position)
            self.limit = self._limit(self.point)
            self.sound = self.recent = self.state.position.clone()
            return
        self.steps, saved = restored.done, restored.state
        for block in restored.blocks:
            self._record(block)
        self.written = self.kept
        device = self.start.device

        def moved(name: str) -> Any:
            return tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, saved[name])

        self.limit, self.sound, self.recent = moved("limit"), moved("sound"), moved("recent")
        self.point, self.state = Point(*moved("point")), type(self.state)(*moved("state"))
        self.factor = saved["factor"]
        self.stream.load_state_dict(saved["stream"])
        set_torch_states(saved["random"])

    def _move(self, ends: list[int], num_warmup: int, bar: tqdm) -> str | None:
        """Move the chains; return the reason of a failure, or None."""
        kernel = self.kernel
        last_write = time.perf_counter()
        while self.steps < ends[-1]:
            step = self.steps
            size = self.factor * kernel.size(step)
            temperature = 0.0 if kernel.explores(step) else kernel.temperature
            moved = None
            if self.loop is not None:
                stops = num_warmup // 2, num_warmup, ends[self.kept]
                count = min(stop - step for stop in (*stops, _next_sound(step)) if stop > step)
                moved = self.loop(
                    self.state, self.point.gradient, self.limit, count,
                    size=size, temperature=temperature,
                )  # fmt: skip
            if moved is None:
                self.state = kernel.update(self.state, self.point.gradient, size, temperature)
                self.point, batch = self._evaluated(self.state.position)
                self.steps += 1
            else:
                taken, self.state, *scores = moved
                self.point, batch = Point(self.state.position, *scores), self.batches.first
                self.steps += taken
            lost = _first_diverged(self.point, self.limit)
            if lost is not None:
                in_warmup = self.steps < num_warmup and self.factor >= _SMALLEST
                if not (kernel.adapt_step_size and in_warmup):
                    return self._reason(lost, batch)
                self.factor *= 0.5
                self.state = kernel.init(self.sound.clone())
                self.point, batch = self._evaluated(self.state.position)
            elif self.steps % _SOUND_EVERY == 0:
                # not the last one, which may be on its way to diverge
                self.sound, self.recent = self.recent, self.state.position.clone()
            if self.steps == num_warmup // 2:
                self.state = kernel.settle(self.state)
            if self.steps == num_warmup:
                self.limit = self._limit(self.point)
            if self.steps == ends[self.kept]:
                self._keep(size)
            bar.update(self.steps - step)
            if self.journal is not None:
                now = time.perf_counter()
                if now - last_write >= _SECONDS_PER_WRITE or self.steps == ends[-1]:
                    self._write(self.journal)
                    last_write = now
        return None

    def _compiled(self) -> "CompiledSteps | None":
        """The loop in JAX, if there is one: steps of one size on all data, on a CPU."""
        whole, device = self.batches.is_whole, self.start.device.type
        if not whole or device != "cpu" or callable(self.kernel.step_size):
            return None
        from pyro_bdl.mcmc.stochastic_gradient.jax_steps import CompiledSteps  # imports JAX

        try:
            return CompiledSteps(self.kernel, self.restriction, self.start)
        except (MissingOperatorError, UnsupportedProgramError):
            return None

    def _evaluated(self, position: Tensor) -> tuple[Point, Batch]:
        """The log density and gradient of every chain on the next minibatch."""
        batch = self.stream.next()
        return Point(position, *self.scores(position, batch)), batch

    def _limit(self, point: Point) -> Tensor:
        """The log density (chains,) below which a chain counts as diverged.

        In a stationary chain the potential energy varies by about T p / 2 around its mean.
        """
        slack = 1000.0 + 10.0 * self.kernel.temperature * point.position.shape[-1]
        return point.log_density - slack - 10.0 * point.log_density.abs()

    def _reason(self, chain: int, batch: Batch) -> str:
        try:
            check_finite(self.restriction.program.model, *batch)
        except ValueError as error:
            return f"a batch at step {self.steps} is bad: {error}"
        return (
            f"chain {chain} diverged at step {self.steps}: use a smaller step_size, which "
            "mcmc.suggest_step_size(model, data, at=guide) computes from a trained guide, and "
            "start from that guide (init=guide)"
        )

    def _keep(self, size: float) -> None:
        point = self.point
        rows = {
            "step_size": torch.full_like(point.log_density, size),
            "potential_energy": -point.log_density,
            # E[(u - c)' grad U] = T p for every c; the variance is small for a c near the draws.
            "configurational_temperature": -((point.position - self.start) * point.gradient).mean(
                -1
            ),
            "vectors": point.position,
            **self.kernel.statistics(self.state, point.gradient, size),
        }
        self._record({name: value[:, None] for name, value in rows.items()})

    def _record(self, rows: Mapping[str, Tensor]) -> None:
        """Append draws (chains, count, ...), by name, up to ``num_samples``."""
        end = min(self.kept + rows["vectors"].shape[1], self.num_samples)
        for name, value in rows.items():
            if name not in self.draws:
                shape = len(value), self.num_samples, *value.shape[2:]
                self.draws[name] = self.start.new_empty(shape, dtype=value.dtype)
            self.draws[name][:, self.kept : end] = value[:, : end - self.kept]
        self.kept = end  # last, so that Ctrl-C loses at most this draw

    def _write(self, journal: Journal) -> None:
        """Write the draws since the last time, and all that the next step needs."""
        state = {
            "factor": self.factor, "limit": self.limit, "sound": self.sound, "recent": self.recent,
            "point": self.point, "state": self.state, "stream": self.stream.state_dict(),
            "random": torch_states(),
        }  # fmt: skip
        new = slice(self.written, self.kept)
        block = {name: value[:, new] for name, value in self.draws.items()}
        journal.write(0, self.steps, state, block if self.kept > self.written else None)
        self.written = self.kept


def _next_sound(step: int) -> int:
    """The next step after which a position to go back to is noted."""
    return (step // _SOUND_EVERY + 1) * _SOUND_EVERY


def _first_diverged(point: Point, limit: Tensor) -> int | None:
    """The first chain whose log density is not finite or below the limit; None if there is none."""
    sound = (point.log_density >= limit) & (point.log_density < float("inf"))
    return None if bool(sound.all()) else int((~sound).nonzero()[0])


def kept_steps(kernel: StochasticKernel, num_warmup: int, num_samples: int) -> list[int]:
    """The steps, counted from 1, after which a draw is kept.

    :raises ValueError: if ``step_size.explores`` is true for too many steps.
    """
    count = kernel.thinning * num_samples
    steps = range(num_warmup, num_warmup + count * _MOST_EXPLORING)
    sampling = (step + 1 for step in steps if not kernel.explores(step))
    kept = list(itertools.islice(sampling, kernel.thinning - 1, count, kernel.thinning))
    if len(kept) < num_samples:
        raise ValueError(
            f"step_size.explores is true for so many steps up to step {steps.stop} that "
            f"{len(kept)} of {num_samples} draws can be kept: let it be False in a part of each "
            "period"
        )
    return kept

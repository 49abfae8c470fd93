"""Chains that move by gradients of minibatches, and the draws that they keep."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pyro_bdl.mcmc.checkpoint import Journal
from pyro_bdl.mcmc.starts import Restriction
from pyro_bdl.mcmc.stochastic_gradient.batched_density import Scores
from pyro_bdl.mcmc.stochastic_gradient.methods import Method
from pyro_bdl.mcmc.stochastic_gradient.minibatches import MinibatchSource, Stream
from pyro_bdl.program.batches import Batch
from pyro_bdl.program.check import check_finite
from pyro_bdl.utils.progress import hidden
from pyro_bdl.utils.random_state import set_torch_states, torch_states

StepSize = float | Callable[[int], float]

_REFRESH = 0.5  # seconds between two updates of the progress bar
_SOUND_EVERY = 20  # steps between two positions to which a diverged chain may go back
_SMALLEST = 1e-9  # factor of the step size below which it is not halved again
_SECONDS_PER_WRITE = 5.0  # of a checkpoint
_WORTH_TRACING = 500  # the number of steps from which tracing saves time


class Point(NamedTuple):
    """Positions of the chains, and the log density there.

    :param position: (chains, P).
    :param log_density: (chains,).
    :param gradient: of the log density, (chains, P).
    """

    position: Tensor
    log_density: Tensor
    gradient: Tensor


class Track(NamedTuple):
    """The draws of chains, and their state at the end.

    :param vectors: the draws (chains, draws, p).
    :param stats: name -> (chains, draws).
    :param steps: the number of steps made.
    :param interrupted: whether Ctrl-C ended the run.
    :param failure: why the run ended early by itself, as text; None if it did not.
    """

    vectors: Tensor
    stats: dict[str, Tensor]
    steps: int
    interrupted: bool
    failure: str | None


class Walk:
    """Chains of stochastic-gradient MCMC, moved by ``run``.

    :param start: the initial positions (chains, p).
    :param step_size: a number or a function of the step; if the function has a method
        ``explores(step)``, steps for which it is true are made without noise.
    :param temperature: T.
    :param adapt: whether a divergence in the warm-up halves the step size, and takes the chains
        back to their last sound positions, instead of ending the run.
    :param options: the method's options.
    :param journal: where the chains are written as they go, and read from if they are there.
    """

    def __init__(
        self,
        method: Method,
        restriction: Restriction,
        batches: MinibatchSource,
        start: Tensor,
        *,
        step_size: StepSize,
        temperature: float,
        adapt: bool = False,
        options: dict[str, float],
        journal: Journal | None = None,
    ) -> None:
        self.adapt, self.factor = adapt, 1.0
        self.method, self.restriction, self.start = method, restriction, start
        self.journal = journal
        self.stream = Stream(batches)
        self.step_size, self.temperature = step_size, temperature
        self.update = partial(method.update, **options)
        self.scores = Scores(restriction.log_density, traced=False)
        self.vectors: Tensor = start
        self.stats: dict[str, Tensor] = {}
        self.kept = self.steps = self.written = 0

    def run(self, kept_steps: list[int], num_warmup: int, progress: bool | None) -> Track:
        """Move the chains to the last of ``kept_steps``, and keep a draw after each of these steps.

        :raises KeyboardInterrupt: if Ctrl-C comes before the first draw.
        """
        chains, width = self.start.shape
        self.vectors = self.start.new_empty(chains, len(kept_steps), width)
        self.scores.traced = kept_steps[-1] >= _WORTH_TRACING
        failure, interrupted = None, False
        bar = tqdm(
            total=kept_steps[-1],
            desc="SG-MCMC",
            disable=hidden(progress),
            leave=False,
            mininterval=_REFRESH,
            delay=1,
        )
        with bar:
            try:
                self._begin()
                bar.update(min(self.steps, kept_steps[-1]))
                failure = self._move(kept_steps, num_warmup, bar)
            except KeyboardInterrupt:
                if not self.kept:
                    raise
                interrupted = True
        stats = {name: value[:, : self.kept] for name, value in self.stats.items()}
        return Track(self.vectors[:, : self.kept], stats, self.steps, interrupted, failure)

    def _begin(self) -> None:
        """Put the chains at their start, or where the journal left them."""
        self.state = self.method.begin(self.start.clone(), self.temperature)
        restored = None if self.journal is None else self.journal.restore()
        if restored is not None:
            blocks = [
                {k: torch.from_numpy(v) for k, v in block.items()} for block in restored.blocks
            ]
            leaves = {name: torch.from_numpy(value) for name, value in restored.leaves.items()}
            self._restore(restored.done, leaves, blocks)
            return
        self.point, _ = self._evaluated(self.state.position)
        self.limit = self._limit(self.point)
        self.sound = self.recent = self.state.position.clone()

    def _move(self, kept_steps: list[int], num_warmup: int, bar: tqdm) -> str | None:
        """Move the chains; return the reason of a failure, or None."""
        method = self.method
        explores = getattr(self.step_size, "explores", None)
        last_write = time.perf_counter()
        for step in range(self.steps, kept_steps[-1]):
            size = self._size(step)
            noise = 0.0 if explores is not None and explores(step) else self.temperature
            self.state = self.update(self.state, self.point.gradient, size, temperature=noise)
            self.point, batch = self._evaluated(self.state.position)
            self.steps = step + 1
            lost = _first_diverged(self.point, self.limit)
            if lost is not None:
                if not self.adapt or self.steps >= num_warmup or self.factor < _SMALLEST:
                    return self._reason(lost, batch)
                self.factor *= 0.5
                self.state = method.begin(self.sound.clone(), self.temperature)
                self.point, batch = self._evaluated(self.state.position)
            elif self.steps % _SOUND_EVERY == 0:
                # not the last one, which may be on its way to diverge
                self.sound, self.recent = self.recent, self.state.position.clone()
            if self.steps == num_warmup // 2 and method.settle is not None:
                self.state = method.settle(self.state)
            if self.steps == num_warmup:
                self.limit = self._limit(self.point)
            if self.steps == kept_steps[self.kept]:
                self._keep(self.state, self.point, size)
            bar.update()
            if self.journal is not None:
                now = time.perf_counter()
                if now - last_write >= _SECONDS_PER_WRITE or self.steps == kept_steps[-1]:
                    self._write(self.journal)
                    last_write = now
        return None

    def _write(self, journal: Journal) -> None:
        """Write the draws since the last time, and all that the next step needs."""
        leaves = {
            "factor": torch.tensor(self.factor, dtype=torch.float64, device="cpu"),
            "limit": self.limit,
            "sound": self.sound,
            "recent": self.recent,
            "log_density": self.point.log_density,
            "gradient": self.point.gradient,
        }
        leaves |= {
            f"state/{name}": torch.as_tensor(value, device="cpu")
            for name, value in self.state._asdict().items()
            if value is not None
        }
        leaves |= {f"stream/{name}": value for name, value in self.stream.place().items()}
        leaves |= {f"random/{name}": value for name, value in torch_states().items()}
        block, new = None, slice(self.written, self.kept)
        if self.kept > self.written:
            rows = {"vectors": self.vectors[:, new]}
            rows |= {f"stats/{name}": value[:, new] for name, value in self.stats.items()}
            block = {name: _array(value) for name, value in rows.items()}
        journal.write(0, self.steps, {k: _array(v) for k, v in leaves.items()}, block)
        self.written = self.kept

    def _restore(
        self, steps: int, leaves: Mapping[str, Tensor], blocks: list[dict[str, Tensor]]
    ) -> None:
        def under(kind: str) -> dict[str, Tensor]:
            return {k.removeprefix(kind): v for k, v in leaves.items() if k.startswith(kind)}

        device = self.start.device
        fields: dict[str, Any] = under("state/")
        for name, value in fields.items():
            fields[name] = bool(value) if value.dtype == torch.bool else value.to(device)
        self.state = type(self.state)(**fields)
        kept = ("limit", "sound", "recent", "log_density", "gradient")
        self.limit, self.sound, self.recent, *there = (leaves[name].to(device) for name in kept)
        self.point = Point(self.state.position, *there)
        self.factor, self.steps = float(leaves["factor"]), steps
        for block in blocks:
            rows = block.pop("vectors").to(device)
            most = min(rows.shape[1], self.vectors.shape[1] - self.kept)
            new = slice(self.kept, self.kept + most)
            self.vectors[:, new] = rows[:, :most]
            for name, value in block.items():
                self._column(name.removeprefix("stats/"), value)[:, new] = value[:, :most]
            self.kept += most
        self.written = self.kept
        self.stream.go_to(under("stream/"))
        set_torch_states(under("random/"))

    def _column(self, name: str, like: Tensor) -> Tensor:
        if name not in self.stats:
            self.stats[name] = like.new_empty(self.vectors.shape[:2], device=self.start.device)
        return self.stats[name]

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

    def _size(self, step: int) -> float:
        if not callable(self.step_size):
            return self.factor * self.step_size
        size = self.step_size(step)
        if not 0 < size < float("inf"):
            raise ValueError(f"step_size must be positive and finite, got {size} at step {step}")
        return self.factor * size

    def _evaluated(self, position: Tensor) -> tuple[Point, Batch]:
        """The log density and gradient of every chain on the next minibatch."""
        batch = next(self.stream)
        values, gradient = self.scores(position, batch)
        return Point(position, values, gradient), batch

    def _limit(self, point: Point) -> Tensor:
        """The log density (chains,) below which a chain counts as diverged.

        In a stationary chain the potential energy varies by about T p / 2 around its mean.
        """
        slack = 1000.0 + 10.0 * self.temperature * point.position.shape[-1]
        return point.log_density - slack - 10.0 * point.log_density.abs()

    def _keep(self, state: Any, point: Point, size: float) -> None:
        stats = {
            "step_size": torch.full_like(point.log_density, size),
            "potential_energy": -point.log_density,
            # E[(u - c)' grad U] = T p for every c; the variance is small for a c near the draws.
            "configurational_temperature": -((point.position - self.start) * point.gradient).mean(
                -1
            ),
        }
        if self.method.statistics is not None:
            stats |= self.method.statistics(state, point.gradient, size)
        for name, value in stats.items():
            self._column(name, value)[:, self.kept] = value
        self.vectors[:, self.kept] = point.position
        self.kept += 1  # last, so that Ctrl-C loses at most this draw


def _array(value: Tensor) -> np.ndarray:
    return value.detach().cpu().numpy()


def _first_diverged(point: Point, limit: Tensor) -> int | None:
    """The first chain whose log density is not finite or below the limit; None if there is none."""
    sound = (point.log_density >= limit) & (point.log_density < float("inf"))
    return None if bool(sound.all()) else int((~sound).nonzero()[0])


def kept_steps(
    step_size: StepSize,
    num_warmup: int,
    num_samples: int,
    thinning: int,
    *,
    most_explored: int = 1_000_000,
) -> list[int]:
    """The steps, counted from 1, after which a draw is kept.

    :param most_explored: steps in a row that may pass without a draw.
    :raises ValueError: if ``step_size.explores`` is true for too many steps.
    """
    explores = getattr(step_size, "explores", None)
    if explores is None:
        return [num_warmup + thinning * (i + 1) for i in range(num_samples)]
    kept: list[int] = []
    step, since, explored = num_warmup, 0, 0
    while len(kept) < num_samples:
        explored = explored + 1 if explores(step) else 0
        since += not explored
        step += 1
        if explored == most_explored:
            raise ValueError(
                f"step_size.explores says that all of the {explored} steps up to step {step} "
                f"explore, which leaves none to keep draws in ({len(kept)} of {num_samples} "
                "found): let it be False in a part of each period"
            )
        if since == thinning:
            kept.append(step)
            since = 0
    return kept

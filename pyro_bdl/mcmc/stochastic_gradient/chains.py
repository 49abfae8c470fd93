"""Chains that move by gradients of minibatches, and the draws that they keep."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_bdl.mcmc.starts import Restriction
from pyro_bdl.mcmc.stochastic_gradient.batched_density import Scores
from pyro_bdl.mcmc.stochastic_gradient.methods import Method
from pyro_bdl.mcmc.stochastic_gradient.minibatches import Minibatches
from pyro_bdl.mcmc.stochastic_gradient.samplers import metropolis
from pyro_bdl.mcmc.stochastic_gradient.samplers.metropolis import Point
from pyro_bdl.program.batches import Batch
from pyro_bdl.program.validation import check_finite
from pyro_bdl.utils.progress import hidden

StepSize = float | Callable[[int], float]

_REFRESH = 0.5  # seconds between two updates of the progress bar
_SOUND_EVERY = 20  # steps between two positions to which a diverged chain may go back
_SMALLEST = 1e-9  # factor of the step size below which it is not halved again
_WORTH_TRACING = 500  # the number of steps from which tracing saves time


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
    """

    def __init__(
        self,
        method: Method,
        restriction: Restriction,
        batches: Minibatches,
        start: Tensor,
        *,
        step_size: StepSize,
        temperature: float,
        adapt: bool = False,
        options: dict[str, float],
    ) -> None:
        self.adapt, self.factor = adapt, 1.0
        self.method, self.restriction, self.start = method, restriction, start
        self.batches: Iterator[Batch] = iter(batches)
        self.step_size, self.temperature = step_size, temperature
        self.update = partial(method.update, **options)
        self.scores = Scores(restriction.log_density, traced=False)
        self.vectors: Tensor = start
        self.stats: dict[str, Tensor] = {}
        self.kept = self.steps = 0

    def run(self, kept_steps: list[int], num_warmup: int, progress: bool | None) -> Track:
        """Move the chains to the last of ``kept_steps``, and keep a draw after each of these steps.

        :raises KeyboardInterrupt: if Ctrl-C comes before the first draw.
        """
        self.vectors = self.start.new_empty(len(self.start), len(kept_steps), self.start.shape[-1])
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
                failure = self._move(kept_steps, num_warmup, bar)
            except KeyboardInterrupt:
                if not self.kept:
                    raise
                interrupted = True
        stats = {name: value[:, : self.kept] for name, value in self.stats.items()}
        return Track(self.vectors[:, : self.kept], stats, self.steps, interrupted, failure)

    def _move(self, kept_steps: list[int], num_warmup: int, bar: tqdm) -> str | None:
        """Move the chains; return the reason of a failure, or None."""
        method, waiting = self.method, iter(kept_steps)
        state = method.begin(self.start.clone(), self.temperature)
        point, batch = self._evaluated(state.position)
        limit, target, accepted = self._limit(point), next(waiting), None
        explores = getattr(self.step_size, "explores", None)
        sound = recent = state.position.clone()
        for step in range(kept_steps[-1]):
            size = self._size(step)
            noise = 0.0 if explores is not None and explores(step) else self.temperature
            state = self.update(state, point.gradient, size, temperature=noise)
            before, (point, batch) = point, self._evaluated(state.position)
            if method.corrected:
                point, accepted = metropolis.correct(
                    before, point, size, temperature=self.temperature
                )
                state = state._replace(position=point.position)
            self.steps = step + 1
            lost = _first_diverged(point, limit)
            if lost is not None:
                if not self.adapt or self.steps >= num_warmup or self.factor < _SMALLEST:
                    return self._reason(lost, batch)
                self.factor *= 0.5
                state = method.begin(sound.clone(), self.temperature)
                point, batch = self._evaluated(state.position)
            elif self.steps % _SOUND_EVERY == 0:
                # not the last one, which may be on its way to diverge
                sound, recent = recent, state.position.clone()
            if self.steps == num_warmup // 2 and method.settle is not None:
                state = method.settle(state)
            if self.steps == num_warmup:
                limit = self._limit(point)
            if self.steps == target:
                self._keep(state, point, size, accepted)
                target = next(waiting, 0)
            bar.update()
        return None

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
        batch = next(self.batches)
        values, gradient = self.scores(position, batch)
        return Point(position, values, gradient), batch

    def _limit(self, point: Point) -> Tensor:
        """The log density (chains,) below which a chain counts as diverged.

        In a stationary chain the potential energy varies by about T p / 2 around its mean.
        """
        slack = 1000.0 + 10.0 * self.temperature * point.position.shape[-1]
        return point.log_density - slack - 10.0 * point.log_density.abs()

    def _keep(self, state: Any, point: Point, size: float, accepted: Tensor | None) -> None:
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
        if accepted is not None:
            stats["accept_prob"] = accepted
        for name, value in stats.items():
            if name not in self.stats:
                self.stats[name] = value.new_empty(self.vectors.shape[:2])
            self.stats[name][:, self.kept] = value
        self.vectors[:, self.kept] = point.position
        self.kept += 1  # last, so that Ctrl-C loses at most this draw


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

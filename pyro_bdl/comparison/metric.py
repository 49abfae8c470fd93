"""A metric: one number for each posterior, with its column of the table."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_bdl.comparison.columns import Column
from pyro_bdl.utils.jackknife import (
    ERRORS,
    GROUPS,
    enlarged,
    jackknife_error,
    number_of_groups,
    of_many,
)
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.trees import tree_leaves, tree_map

Inputs = Mapping[str, tuple[Any, ...]]  # of metrics, by ``of``
NUMBERS, CLASSES = "regression", "classification"
WHOLE = "whole"
_POINT_GROUPS = 20
_OF_PLACES = ("far_at", "khat_high")  # shares of the points, with an error over runs only


@dataclass(frozen=True)
class Metric:
    """A number that a comparison computes for each posterior, with its column of the table.

    ``metric`` makes one of a function of :mod:`pyro_bdl.comparison.scores` (one posterior on test
    data), :mod:`pyro_bdl.comparison.costs` (its fit and chains), ``leave_one_out`` or
    :mod:`pyro_bdl.comparison.distances` (a posterior against the reference). Its place there is its
    place in its group of the table.

    :param key: name of the number in the rows and in CSV files.
    :param title: heading of its column; empty for a number that only verdicts use.
    :param help: one or two sentences on the number's meaning and units.
    :param function: from the inputs to a number, a scalar tensor or a text, or a number with its
        error; None if it is unknown.
    :param of: name of the inputs; its module lists them. If they are not known, the number is left
        out. Empty for a number that is made elsewhere.
    :param group: heading of the group of its column.
    :param detail: whether the column is a further one.
    :param task: ``"regression"`` or ``"classification"``; None for both.
    :param style: style of the column, see ``Column``; ``digits`` are its digits.
    :param error: whether the rows hold its error, under ``key_se``.
    :param over_points: for a score that is a mean over the test points: ``"mean"``, ``"share"`` for
        the mean of zeros and ones, or ``"root"`` for the square root of a mean. The function then
        returns the value of each point, ``(N, ...)``; the rows hold the standard error over points
        and draws under ``key_se``, and the paired difference from the reference under ``key_diff``
        with its error. ``"whole"`` is for a number of all points that is no mean over them: the
        function returns it, and its errors are those of the jackknife.
    """

    key: str
    title: str
    help: str
    function: Callable[..., Any]
    of: str
    group: str = ""
    detail: bool = False
    task: str | None = None
    style: str = "number"
    digits: int = 3
    error: bool = False
    over_points: str = ""

    def of_values(self, values: Tensor) -> Tensor:
        """The number from the values ``(..., N)`` at the points."""
        mean = values.mean(-1)
        return mean.sqrt() if self.over_points == "root" else mean

    def column(self) -> Column:
        """The column that shows the number."""
        help, error = self.help, f"{self.key}_se" if self.error or self.over_points else ""
        if self.over_points:
            help += " With its standard error, over the test points and over the draws."
        return Column(self.key, self.title, self.group, help, self.style, self.digits, error)

    def difference_column(self) -> Column:
        """The column of the paired difference from the reference."""
        help = (
            f"{self.title} minus the reference's at the same test points, with the standard error "
            "of this difference, over the points and over the draws of both. It is enlarged for "
            "few points or draws, so that two of them are a 95 % interval."
        )
        key = f"{self.key}_diff"
        group = f"{self.group}, difference to {{reference}}"
        return Column(key, self.title, group, help, self.style, error=f"{key}_se")


def metric(
    title: str, of: str, *, key: str = "", **options: Any
) -> Callable[[Callable[..., Any]], Metric]:
    """Make a ``Metric`` of the function below, whose docstring is the help of its column.

    :param key: by default the function's name.
    :param options: of ``Metric``.
    """

    def made(function: Callable[..., Any]) -> Metric:
        help = " ".join((function.__doc__ or "").split())
        return Metric(key or function.__name__, title, help, function, of, **options)

    return made


def metrics_of(module: Mapping[str, Any]) -> tuple[Metric, ...]:
    """The metrics among a module's names, in the order of its file."""
    return tuple(value for value in module.values() if isinstance(value, Metric))


def of_task(metrics: Iterable[Metric], task: str) -> list[Metric]:
    """The metrics of a task."""
    return [metric for metric in metrics if metric.task in (None, task)]


def measure(metrics: Iterable[Metric], task: str, inputs: Inputs) -> dict[str, Any]:
    """The numbers by key, for the metrics of the task whose inputs are known.

    Those that are means over the test points come from ``measure_points``.
    """
    known = (m for m in of_task(metrics, task) if m.of in inputs and not m.over_points)
    values: dict[str, Any] = {}
    for one in known:
        found = one.function(*inputs[one.of])
        number, error = found if isinstance(found, tuple) else (found, None)
        values |= {one.key: number, f"{one.key}_se": error}
    return {
        key: value if isinstance(value, str | int) else float(value)
        for key, value in values.items()
        if value is not None
    }


def measure_points(
    metrics: Iterable[Metric], task: str, inputs: Inputs, seen: Tensor | None = None
) -> dict[str, Tensor]:
    """The values ``(N,)`` at each test point, of the metrics that are means over them.

    Values of several numbers in one target are averaged: the rows are what was sampled.

    :param seen: which numbers of the targets were seen, ``(N, ...)``, at least one of each; the
        others are left out of the averages.
    """
    known = (m for m in of_task(metrics, task) if m.of in inputs and m.over_points)
    known = (m for m in known if m.over_points != WHOLE)
    values = {m.key: double(m.function(*inputs[m.of])) for m in known}
    if seen is None:
        return {key: value.reshape(len(value), -1).mean(1) for key, value in values.items()}
    return {
        key: _mean_of_seen(value, seen) if value.shape == seen.shape else value
        for key, value in values.items()
    }


def _mean_of_seen(values: Tensor, seen: Tensor) -> Tensor:
    kept = torch.where(seen, values, 0.0)  # a number that was not seen may be anything
    return kept.reshape(len(seen), -1).sum(1) / seen.reshape(len(seen), -1).sum(1)


@dataclass(frozen=True)
class PointScores:
    """The number, its error, and each point's influence on it, of a mean over the test points.

    It has three errors, which add up as squares. The one over the points: the influence psi_n of a
    point is that of the delta method, v_n for the mean of values v, and v_n / (2 sqrt(mean v)) for
    its root; the error is the sd of psi over sqrt(N), and that of a difference of two scores the sd
    of the difference of their influences over sqrt(N). The one over the draws, which is common to
    all points, is that of the grouped jackknife (:mod:`pyro_bdl.utils.jackknife`). The one over the
    runs of a method, of which the number is the mean, is their sd over sqrt(R).

    Of values with weights w_n, the numbers of a target that were seen, m = sum w v / sum w, and the
    value of a point is m + N w_n (v_n - m) / sum w.

    A share of which all points, or none, are counted would get no error; as Agresti & Coull (1998)
    propose, two points of each kind are added for the error of every share.

    :param number: the score.
    :param over_points: its standard error over the points; NaN for a single point.
    :param influence: ``(N,)``.
    :param groups: the score without each group of draws minus the score, ``(G,)``, of a share less
        their mean: zeros where it does not come from draws, and empty where they are too few to
        say.
    :param runs: ``(R,)``, the numbers of several runs; empty of one.
    """

    number: float
    over_points: float
    influence: Tensor
    groups: Tensor
    runs: Tensor = field(default_factory=partial(torch.empty, 0, device="cpu"))

    @classmethod
    def of(
        cls,
        metric: Metric,
        values: Tensor,
        groups: Tensor | None = None,
        weights: Tensor | None = None,
        group_weights: Tensor | None = None,
    ) -> "PointScores":
        """The score of a metric from the values ``(N,)`` at the points.

        :param groups: the values ``(1 + G, n)`` at some points, of all draws and without each group
            of them; None for values that do not come from draws.
        :param weights: of the points, ``(N,)``; equal ones by default.
        :param group_weights: of the points of ``groups``, ``(n,)``.
        """
        values = _weighted(values, weights)
        number = metric.of_values(values)
        influence = values
        if metric.over_points == "root":
            influence = values / (2 * number) if number > 0 else torch.zeros_like(values)
        of_error = influence
        if metric.over_points == "share":
            of_error = torch.cat([values, values.new_tensor([0.0, 0.0, 1.0, 1.0])])
        apart = values.new_zeros(GROUPS)
        if groups is not None:
            several = metric.of_values(_weighted(groups, group_weights))
            apart = several[1:] - several[0]
        if metric.over_points == "share" and len(apart):  # has steps, which say nothing of a bias
            apart = apart - apart.mean()
        return cls(float(number), standard_error_of_mean(of_error), influence, apart.cpu())

    @classmethod
    def of_whole(
        cls,
        metric: Metric,
        inputs: Any,
        views: Sequence[Any] | None,
        rows: Tensor | None = None,
        with_ends: Any = None,
    ) -> "PointScores":
        """The score of a metric that is no mean over the points.

        The points are dealt at random, the same for all posteriors, into G groups, and the number
        v_g is computed without each. The pseudo-values G v - (G - 1) v_g are the influence, of
        which the error over the points follows, enlarged for few groups and with the bias of few
        points, (G - 1) (mean v_g - v) (Quenouille 1956; Tukey 1958).

        :param inputs: of the metric, of whose tensors the first axis is that of the points.
        :param views: the inputs of all draws and without each group of them, at the same or fewer
            points; none where these are too few, and None for values that do not come from draws.
        :param rows: of which row each point is, ``(N,)``, which are what was sampled.
        :param with_ends: the inputs that the error over the points is computed of.
        """
        number = float(metric.function(*inputs))
        inputs = inputs if with_ends is None else with_ends
        counts = [
            len(value) if rows is None else int(rows.max()) + 1 for value in tree_leaves(inputs)
        ]
        groups, whole = min(_POINT_GROUPS, *counts), float(metric.function(*inputs))

        def without(g: int) -> float:
            def kept(values: Tensor) -> Tensor:
                of = torch.arange(len(values), device="cpu") if rows is None else rows.cpu()
                order = np.random.default_rng(0).permutation(int(of.max()) + 1) % groups
                return values[torch.as_tensor(order != g, device="cpu")[of].to(values.device)]

            return float(metric.function(*tree_map(kept, inputs)))

        each = torch.tensor(
            [without(g) for g in range(groups)] if groups > 1 else [math.nan] * 2,
            dtype=torch.float64, device="cpu",
        )  # fmt: skip
        bias = (groups - 1) * (float(each.mean()) - whole)
        error = float(jackknife_error(each)) * enlarged(ERRORS, (1.0, groups - 1))
        apart = each.new_zeros(GROUPS)
        if views is not None:
            several = each.new_tensor([float(metric.function(*view)) for view in views])
            apart = several[1:] - several[:1]
        influence = groups * whole - (groups - 1) * each
        return cls(number, math.hypot(error, bias), influence, apart)

    @property
    def over_draws(self) -> float:
        """The standard error over the draws, with the bias that their small number leaves, which
        is (G - 1) times the mean of the groups (Quenouille 1956); NaN if it is unknown."""
        if not len(self.groups):
            return math.nan
        bias = (len(self.groups) - 1) * float(self.groups.mean())
        return math.hypot(float(jackknife_error(self.groups)), bias)

    @classmethod
    def of_runs(cls, runs: "Sequence[PointScores]") -> "PointScores":
        """The mean of a score over runs of one method, with the error over them.

        That over the draws, which the runs' differences hold too, is of each its own.
        """
        numbers = torch.tensor([run.number for run in runs], dtype=torch.float64, device="cpu")
        points = sum(run.over_points for run in runs) / len(runs)
        influence = torch.stack([run.influence for run in runs]).mean(0)
        return cls(
            float(numbers.mean()), points, influence, torch.zeros(GROUPS, device="cpu"), numbers
        )

    @property
    def of_the_runs(self) -> tuple[float, int]:
        """The error over the runs, and its degrees of freedom."""
        return standard_error_of_mean(self.runs) if len(self.runs) else 0.0, len(self.runs) - 1

    @property
    def error(self) -> float:
        """All errors together."""
        return math.hypot(self.over_points, self.over_draws, over_runs(self.runs))

    def with_effective(self, draws: float) -> "PointScores":
        """The same score of correlated draws: their error is unknown if there are fewer than 4
        effective ones in a group.

        :param draws: the number of effective draws.
        """
        is_known = number_of_groups(draws) >= len(self.groups) or not self.groups.any()
        return self if is_known else replace(self, groups=self.groups[:0])

    def difference(self, other: "PointScores", *, of: int = 1) -> tuple[float, float]:
        """This score minus another at the same points, and the standard error, enlarged for few
        points or groups so that a difference is beyond two of them in 5 % of the cases.

        :param of: how many differences are looked at, of which one or more are then beyond two of
            their errors in at most 5 % of the cases (Bonferroni).
        """
        gap = self.influence - other.influence.to(self.influence.device)
        limit = of_many(of)
        error = total_error(
            (standard_error_of_mean(gap), len(gap) - 1),
            *((side._at_an_end, len(gap) - 1) for side in (self, other)),
            *(part for side in (self, other) for part in (side.of_draws, side.of_the_runs)),
            limit=limit,
        )
        return self.number - other.number, error * limit / ERRORS

    @property
    def _at_an_end(self) -> float:
        """The error over the points of a share to which all of them add alike; 0 of others."""
        return self.over_points if standard_error_of_mean(self.influence) == 0 else 0.0

    @property
    def of_draws(self) -> tuple[float, int]:
        """The error over the draws, and its degrees of freedom."""
        return self.over_draws, len(self.groups) - 1


def _weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    """Values ``(..., N)`` whose mean is the weighted mean of these, and whose spread is its
    influence."""
    if weights is None:
        return values
    weights = weights / weights.mean()
    mean = (weights * values).mean(-1, keepdim=True)
    return mean + weights * (values - mean)


def over_runs(numbers: Tensor) -> float:
    """The standard error of a mean over R runs, enlarged for few; 0 of no runs."""
    if not len(numbers):
        return 0.0
    return standard_error_of_mean(numbers) * enlarged(ERRORS, (1.0, len(numbers) - 1))


def mean_of_runs(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers that all runs of a method have, averaged; what is text is that of the first.

    The error of each, ``key_se``, is that of a single run with the error over the runs.
    """
    if len(rows) == 1:
        return dict(rows[0])
    mean: dict[str, Any] = {}
    values = {key: [row[key] for row in rows] for key in rows[0] if all(key in r for r in rows)}
    for key, several in values.items():
        is_text = isinstance(several[0], str)
        mean[key] = several[0] if is_text else float(sum(several)) / len(several)
    for key in [key for key in mean if f"{key}_se" in mean or key in _OF_PLACES]:
        error = over_runs(torch.tensor(values[key], dtype=torch.float64, device="cpu"))
        mean[f"{key}_se"] = math.hypot(mean.get(f"{key}_se", 0.0), error)
    return mean


def total_error(*parts: tuple[float, float], limit: float = ERRORS) -> float:
    """The error of a difference from its independent parts, each with its degrees of freedom, for
    a limit of so many errors."""
    return math.hypot(*(error for error, _ in parts)) * enlarged(limit, *parts)


def error_of_share(share: float, count: int) -> float:
    """The standard error of a share of N points, with two added of each kind, so that none and all
    have one too (Agresti & Coull 1998)."""
    p, n = (share * count + 2) / (count + 4), count + 4
    return math.sqrt(p * (1 - p) / n)


def standard_error_of_mean(values: Tensor) -> float:
    """sd / sqrt(N); NaN for a single value."""
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def evenly(draws: Tensor, chains: int, most: int) -> Tensor:
    """At most ``most`` draws, evenly spaced, with equally many from each chain."""
    by_chain = draws.unflatten(0, (chains, -1))
    total, count = by_chain.shape[1], max(1, most // chains)
    if total <= count:
        return draws
    chosen = (torch.arange(count, device=draws.device) * total) // count
    return by_chain[:, chosen].flatten(0, 1)

"""The protocol of a metric: one number for each posterior, and its column of the table."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.utils.tables import Column


@dataclass(frozen=True)
class Metric:
    """A number that a comparison computes for each posterior, with its column of the table.

    To add one, put it into a tuple of :mod:`pyro_bdl.comparison.scores` (one posterior on test
    data) or of :mod:`pyro_bdl.comparison.distances` (a posterior against the reference). Its place
    in the tuple is its place in the table.

    :param key: name of the number in the rows and in CSV files.
    :param title: heading of its column; empty for a number that only verdicts use.
    :param help: one sentence on the number's meaning and units.
    :param function: from the inputs to a number or a scalar tensor.
    :param of: name of the inputs; the module of the tuple lists them. If they are not known, the
        number is left out.
    :param task: ``"regression"`` or ``"classification"``; None for both.
    :param style: style of the column, see ``Column``.
    :param error: whether the rows hold its Monte Carlo error, under ``key_se``. Distances only.
    :param over_points: for a score that is a mean over the test points: ``"mean"``, or ``"root"``
        for the square root of a mean. The function then returns the value of each point, ``(N,
        ...)``; the rows hold the standard error over the points under ``key_se``, and the paired
        difference from the reference under ``key_diff`` with its error.
    """

    key: str
    title: str
    help: str
    function: Callable[..., Any]
    of: str
    task: str | None = None
    style: str = "number"
    error: bool = False
    over_points: str = ""

    @property
    def error_key(self) -> str:
        """Name of the error in the rows; empty without one."""
        return f"{self.key}_se" if self.error or self.over_points else ""

    def column(self) -> Column:
        """The column that shows the number."""
        help = self.help
        if self.over_points:
            help += " With its standard error over the test points."
        return Column(self.key, self.title, help=help, style=self.style, error=self.error_key)

    def difference_column(self) -> Column:
        """The column of the paired difference from the reference."""
        return Column(
            f"{self.key}_diff",
            self.title,
            help=f"{self.title} minus the reference's at the same test points, with the standard "
            "error of this difference.",
            style=self.style,
            error=f"{self.key}_diff_se",
        )


def of_task(metrics: Iterable[Metric], task: str) -> list[Metric]:
    """The metrics of a task."""
    return [metric for metric in metrics if metric.task in (None, task)]


def measure(
    metrics: Iterable[Metric], task: str, inputs: Mapping[str, tuple[Any, ...]]
) -> dict[str, float]:
    """The numbers by key, for the metrics of the task whose inputs are known.

    Those that are means over the test points come from ``measure_points``.
    """
    return {
        metric.key: _number(metric.function(*inputs[metric.of]))
        for metric in of_task(metrics, task)
        if metric.of in inputs and not metric.over_points
    }


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def measure_points(
    metrics: Iterable[Metric], task: str, inputs: Mapping[str, tuple[Any, ...]]
) -> dict[str, Tensor]:
    """The values ``(N,)`` at each test point, of the metrics that are means over them.

    Values of several numbers in one target are averaged: the rows are what was sampled.
    """
    found = {}
    for metric in of_task(metrics, task):
        if metric.of in inputs and metric.over_points:
            values = metric.function(*inputs[metric.of])
            found[metric.key] = values.detach().double().reshape(len(values), -1).mean(1)
    return found


@dataclass(frozen=True)
class PointScores:
    """The number, its error, and each point's influence on it, of a mean over the test points.

    The influence psi_n of a point is that of the delta method: v_n for the mean of values v, and
    v_n / (2 sqrt(mean v)) for its root. The error is the sd of psi over sqrt(N), and that of a
    difference of two scores the sd of the difference of their influences over sqrt(N).

    A share of which all points, or none, are counted would get no error; as Agresti & Coull (1998)
    propose, two points of each kind are added for the error of every share.

    :param number: the score.
    :param error: its standard error; NaN for a single point.
    :param influence: ``(N,)``.
    """

    number: float
    error: float
    influence: Tensor

    @classmethod
    def of(cls, metric: Metric, values: Tensor) -> "PointScores":
        """The score of a metric from the values ``(N,)`` at the points."""
        mean = values.mean()
        influence, number = values, mean
        if metric.over_points == "root":
            number = mean.sqrt()
            influence = values / (2 * number) if number > 0 else torch.zeros_like(values)
        of_error = influence
        if metric.style == "percent":
            of_error = torch.cat([values, values.new_tensor([0.0, 0.0, 1.0, 1.0])])
        return cls(float(number), standard_error_of_mean(of_error), influence)

    def difference(self, other: "PointScores") -> tuple[float, float]:
        """This score minus another at the same points, and the standard error."""
        gap = self.influence - other.influence.to(self.influence.device)
        return self.number - other.number, standard_error_of_mean(gap)


def standard_error_of_mean(values: Tensor) -> float:
    """sd / sqrt(N); NaN for a single value."""
    if len(values) < 2:
        return math.nan
    return float(values.std()) / math.sqrt(len(values))


def evenly(draws: Tensor, chains: int, most: int) -> Tensor:
    """At most ``most`` draws, evenly spaced, with equally many from each chain."""
    by_chain = draws.unflatten(0, (chains, -1))
    total, count = by_chain.shape[1], max(1, most // chains)
    if total <= count:
        return draws
    chosen = (torch.arange(count, device=draws.device) * total) // count
    return by_chain[:, chosen].flatten(0, 1)

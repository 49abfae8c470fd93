"""The protocol of a metric: one number for each posterior, and its column of the table."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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
    """

    key: str
    title: str
    help: str
    function: Callable[..., Any]
    of: str
    task: str | None = None
    style: str = "number"
    error: bool = False

    @property
    def error_key(self) -> str:
        """Name of the Monte Carlo error in the rows; empty without one."""
        return f"{self.key}_se" if self.error else ""

    def column(self) -> Column:
        """The column that shows the number."""
        return Column(self.key, self.title, help=self.help, style=self.style, error=self.error_key)


def of_task(metrics: Iterable[Metric], task: str) -> list[Metric]:
    """The metrics of a task."""
    return [metric for metric in metrics if metric.task in (None, task)]


def measure(
    metrics: Iterable[Metric], task: str, inputs: Mapping[str, tuple[Any, ...]]
) -> dict[str, float]:
    """The numbers by key, for the metrics of the task whose inputs are known."""
    return {
        metric.key: float(metric.function(*inputs[metric.of]))
        for metric in of_task(metrics, task)
        if metric.of in inputs
    }

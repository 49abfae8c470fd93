"""The columns of a comparison's table, in groups; each is declared next to the code that computes
it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyro_bdl.comparison import (
    convergence,
    costs,
    determined,
    input_regions,
    judge,
    leave_one_out,
)
from pyro_bdl.comparison.distances import ALL_DISTANCES, DISTANCES, FURTHER_DISTANCES
from pyro_bdl.comparison.metric import Metric, of_task
from pyro_bdl.comparison.scores import CALIBRATION, TEST_DATA, UNCERTAINTY
from pyro_bdl.utils.tables import Column


def columns(task: str, reference: str | None) -> list[Column]:
    """The columns of the table for ``"regression"`` or ``"classification"``, in order.

    :param reference: heading of the reference's columns; None without a reference.
    """
    left_out: tuple[Column, ...] = leave_one_out.COLUMNS
    if reference is not None:
        left_out = (*left_out, leave_one_out.DIFFERENCE)
    return _grouped(
        {
            "": (costs.COLUMNS[0], judge.COLUMN, *costs.COLUMNS[1:]),
            "parameters that the data determine": determined.COLUMNS,
            "test data": _of_metrics(TEST_DATA, task),
            f"distance to {reference}": _of_metrics(DISTANCES, task),
            "leave one out": left_out,
            "Markov chains": convergence.COLUMNS,
        },
        reference,
    )


def details(task: str, reference: str | None) -> list[Column]:
    """Further columns, in the order of their groups."""
    return _grouped(
        {
            "costs": costs.FURTHER_COLUMNS,
            "parameters that the data determine": determined.FURTHER_COLUMNS,
            "calibration": _of_metrics(CALIBRATION, task),
            "uncertainty": _of_metrics(UNCERTAINTY, task),
            f"test data, difference to {reference}": [
                metric.difference_column()
                for metric in of_task(TEST_DATA, task)
                if metric.over_points
            ],
            f"distance to {reference}": _of_metrics(FURTHER_DISTANCES, task),
            f"sd ratio to {reference}": input_regions.COLUMNS,
            "leave one out": leave_one_out.FURTHER_COLUMNS,
            "Markov chains": convergence.FURTHER_COLUMNS,
        },
        reference,
    )


def check_keys(task: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Check that every number in the rows has a column or a metric.

    :param rows: the rows of the table.
    :raises KeyError: for a key without a column and without a metric.
    """
    shown = [*columns(task, "reference"), *details(task, "reference")]
    known = {column.key for column in shown} | {column.error for column in shown}
    for metric in of_task(ALL_DISTANCES, task):
        known |= {metric.key, metric.error_key}
    unknown = sorted({key for row in rows for key in row} - known)
    if unknown:
        raise KeyError(
            f"the rows hold {', '.join(map(repr, unknown))}, which no column shows: declare a "
            "Metric, or a Column in pyro_bdl.comparison.columns"
        )


def _of_metrics(metrics: Iterable[Metric], task: str) -> list[Column]:
    return [metric.column() for metric in of_task(metrics, task)]


def _grouped(groups: Mapping[str, Sequence[Column]], reference: str | None) -> list[Column]:
    return [
        replace(column, group=group)
        for group, members in groups.items()
        if reference is not None or not group.endswith(" to None")
        for column in members
    ]

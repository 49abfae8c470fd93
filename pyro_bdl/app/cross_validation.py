"""Scores over several splits of the data: posteriors fitted again for every fold."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pyro_bdl.utils.tables import Column

Scores = Mapping[str, Mapping[str, float]]

_SCORES = (
    ("rmse", "RMSE"),
    ("accuracy", "accuracy"),
    ("nlpd", "NLPD"),
    ("crps", "CRPS"),
    ("coverage", "in 90 %"),
    ("brier", "Brier"),
)
_PERCENT = ("accuracy", "coverage")
NOTE = (
    "Each posterior was fitted again on each split. The errors are those of the mean over the "
    "splits, sqrt((1 / splits + test rows / training rows) variance), since the splits share "
    "training rows (Nadeau & Bengio 2003); differences are paired by split. The answer and the "
    "other tables are of one split."
)


def summarized(
    found: Sequence[Scores], names: Sequence[str], reference: str | None, folds: int
) -> tuple[list[dict[str, Any]], list[Column]]:
    """Means over the splits with their errors, and paired differences from the reference.

    :param found: the scores of each split.
    :param names: the posteriors; those that lack a split are left out.
    :param reference: the posterior to which differences are taken, if it is there.
    :param folds: K: the test part of each split is 1 / (K - 1) of its training part.
    """
    there = [name for name in names if found and all(name in split for split in found)]
    reference = reference if reference in there else None
    rows: list[dict[str, Any]] = []
    for name in there:
        row: dict[str, Any] = {"posterior": name}
        for key, _ in _SCORES:
            if not all(key in split[name] for split in found):
                continue
            values = [split[name][key] for split in found]
            row[key], row[f"{key}_se"] = mean_and_error(values, folds)
            if reference is not None and name != reference:
                gaps = [split[name][key] - split[reference][key] for split in found]
                row[f"{key}_diff"], row[f"{key}_diff_se"] = mean_and_error(gaps, folds)
        rows.append(row)
    columns = [Column("posterior", "posterior", style="text")]
    for part, group in (("", "mean over the splits"), ("_diff", f"difference from {reference}")):
        columns += [
            Column(
                f"{key}{part}",
                title,
                group,
                error=f"{key}{part}_se",
                style="percent" if key in _PERCENT else "number",
            )
            for key, title in _SCORES
            if any(f"{key}{part}" in row for row in rows)
        ]
    return rows, columns


def mean_and_error(values: Sequence[float], folds: int) -> tuple[float, float]:
    """The mean of scores of splits, and its standard error; NaN for a single split.

    With J splits whose scores have the variance s^2, and K folds::

        se^2 = (1 / J + 1 / (K - 1)) s^2

    since the test part has 1 / (K - 1) of the training part's rows.

    Source: Nadeau & Bengio (2003), Inference for the generalization error, section 3.
    """
    numbers = torch.tensor(values, dtype=torch.float64, device="cpu")
    if len(values) < 2:
        return float(numbers.mean()), math.nan
    return float(numbers.mean()), math.sqrt((1 / len(values) + 1 / (folds - 1)) * numbers.var())

"""Scores over several splits of the data: posteriors fitted again for every fold."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pyro_bdl.comparison.columns import Column

SCORES = tuple(
    Column(key, title, error=f"{key}_se", style=style)
    for key, title, style in (
        ("rmse", "RMSE", "number"),
        ("accuracy", "accuracy", "percent"),
        ("nlpd", "NLPD", "number"),
        ("crps", "CRPS", "number"),
        ("crps_censored", "CRPS, censored", "number"),
        ("coverage", "in 90 %", "percent"),
        ("brier", "Brier", "number"),
        ("ranked_probability_score", "RPS", "number"),
    )
)
NOTE = (
    "Each posterior was fitted again on each split. The errors are those of the mean over the "
    "splits, sqrt((1 / splits + test rows / training rows) variance), since the splits share "
    "training rows (Nadeau & Bengio 2003); differences are paired by split. The answer and the "
    "other tables are of one split."
)


def summarized(
    splits: Sequence[Mapping[str, Mapping[str, Any]]], reference: str, folds: int
) -> tuple[list[dict[str, Any]], list[Column]]:
    """Means over the splits with their errors, and paired differences from the reference.

    :param splits: the scores of each split by posterior; posteriors that lack a split are left out.
    :param reference: the posterior to which differences are taken, if it is there.
    :param folds: K: the test part of each split is 1 / (K - 1) of its training part.
    """
    names = [name for name in splits[0] if all(name in split for split in splits)]
    rows: list[dict[str, Any]] = [{"posterior": name} for name in names]
    columns = [Column("posterior", "posterior", style="text")]
    for suffix, group in (("", "mean over the splits"), ("_diff", f"difference from {reference}")):
        if suffix and reference not in names:
            break
        for score in SCORES:
            table = np.array([[s[n].get(score.key, math.nan) for n in names] for s in splits])
            if np.isnan(table).any():
                continue
            if suffix:
                table = table - table[:, [names.index(reference)]]
            key, error = f"{score.key}{suffix}", f"{score.key}{suffix}_se"
            columns.append(replace(score, key=key, error=error, group=group))
            for row, values in zip(rows, table.T, strict=True):
                if not (suffix and row["posterior"] == reference):
                    row[key], row[error] = mean_and_error(values, folds)
    return rows, columns


def mean_and_error(values: Sequence[float], folds: int) -> tuple[float, float]:
    """The mean of scores of splits, and its standard error.

    With J splits whose scores have the variance s^2, and K folds::

        se^2 = (1 / J + 1 / (K - 1)) s^2

    since the test part has 1 / (K - 1) of the training part's rows.

    Source: Nadeau & Bengio (2003), Inference for the generalization error, section 3.
    """
    variance = np.var(values, ddof=1)
    return float(np.mean(values)), math.sqrt((1 / len(values) + 1 / (folds - 1)) * variance)

"""Calibration of predictions: reliability, coverage of intervals, PIT histograms."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from scipy import stats
from torch import Tensor

from pyro_bdl import metrics
from pyro_bdl.plots.bars import bars as draw_bars
from pyro_bdl.plots.bars import key, room_above
from pyro_bdl.plots.style import (
    GRAY,
    array,
    check_level,
    check_posteriors,
    columns_for,
    legend_below,
    panels,
    styles,
    title,
)


def calibration(
    predictions: Mapping[str, Tensor],
    y: Tensor,
    *,
    task: str,
    reference: str | None = None,
    bins: int = 10,
) -> Figure:
    """Coverage of central intervals for a regression, a reliability diagram for classes.

    A posterior is calibrated on the diagonal and overconfident below it.

    :param predictions: regression: draws ``(S, N, ...)`` of the target, noise included;
        classification: probabilities ``(N, C)``.
    :param y: ``(N, ...)`` targets or ``(N,)`` class indices.
    :param task: ``"regression"`` or ``"classification"``.
    :param reference: name of the reference, drawn in dark gray.
    :param bins: number of bins of the confidence in a reliability diagram; empty ones are left out.
    :raises ValueError: for no posterior, an unknown task or reference, or shapes that do not fit.
    """
    check_posteriors(predictions, reference)
    if task not in ("regression", "classification"):
        raise ValueError(f"task={task!r} is unknown; choose 'regression' or 'classification'")
    figure, (axis,) = panels(1, height=4.6)
    axis.plot([0, 1], [0, 1], color=GRAY, linewidth=1, linestyle="--", zorder=1)
    look = styles(predictions, reference)
    levels = np.arange(1, 20) / 20
    for name, values in predictions.items():
        where: Any
        found: Any
        if task == "regression":
            where = levels
            found = array(metrics.interval_coverage(values, y, level=levels.tolist()))
        else:
            where, found, share = map(array, metrics.reliability(values, y, bins=bins))
            where, found = where[share > 0], found[share > 0]
        axis.plot(where, found, linewidth=1.5, markersize=5, label=name, **look[name])
    axis.text(0.97, 0.06, "overconfident", ha="right", color=GRAY, fontstyle="italic")
    axis.text(0.03, 0.94, "underconfident", va="center", color=GRAY, fontstyle="italic")
    axis.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    if task == "regression":
        axis.set_xlabel("level of the central interval")
        axis.set_ylabel("share of test targets inside")
    else:
        axis.set_xlabel("confidence of the predicted class")
        axis.set_ylabel("share predicted right")
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        each.set_major_locator(MaxNLocator(5))
    legend_below(figure, *axis.get_legend_handles_labels())
    return figure


def pit_histogram(
    predictions: Mapping[str, Tensor],
    y: Tensor,
    *,
    reference: str | None = None,
    bins: int = 10,
    level: float = 0.99,
) -> Figure:
    """Histograms of the probability integral transform of the test targets, one panel per
    posterior.

    They are flat if predictions are calibrated, valleys if they are too narrow, hills if they are
    too wide, and slopes if they are biased. If the N targets are independent draws of the
    predictions, a bar lies within the band with probability ``level``: quantiles of Binomial(N, 1 /
    bins).

    :param predictions: draws ``(S, N, ...)`` of the target, noise included.
    :param y: ``(N, ...)``, the targets.
    :param reference: name of the reference, drawn in dark gray.
    :param bins: number of bins of each histogram.
    :param level: probability of the band.
    :raises ValueError: for no posterior, an unknown reference, fewer than 2 bins, a level outside
        (0, 1), or draws that do not fit y.

    Source: Gneiting, Balabdaoui & Raftery (2007), Probabilistic forecasts, calibration and
    sharpness.
    """
    check_posteriors(predictions, reference)
    check_level(level)
    if bins < 2:
        raise ValueError(f"bins must be at least 2, got {bins}")
    look = styles(predictions, reference)
    bar = stats.binom(y.numel(), 1 / bins)
    low, high = bar.ppf((1 - level) / 2), bar.ppf((1 + level) / 2)
    columns = columns_for(len(predictions))
    figure, axes = panels(len(predictions), height=1.9, columns=columns, sharex=True, sharey=True)
    edges = np.linspace(0, 1, bins + 1)
    counts = {name: pit_counts(values, y, bins) for name, values in predictions.items()}
    for place, (axis, (name, heights)) in enumerate(zip(axes, counts.items(), strict=True)):
        color = look[name]["color"]
        draw_bars(axis, edges, heights, band=(low, high), expected=bar.mean(), color=color)
        axis.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        title(axis, name, look[name])
        if place % columns == 0:
            axis.set_ylabel("test targets")
    room_above(axes, max(high, *(heights.max() for heights in counts.values())))
    for axis in axes[-columns:]:
        axis.set_xlabel("PIT")
    legend_below(figure, *zip(*key(level), strict=True))
    return figure


def pit_counts(draws: Tensor, y: Tensor, bins: int) -> np.ndarray:
    """The number of targets in each bin of the probability integral transform, ``(bins,)``; the sum
    is N.

    The rank of a target among S draws is one of S + 1 numbers, or a range of them if draws equal
    the target. The target is spread evenly over this range::

        [ #{s: x_s < y} , #{s: x_s <= y} + 1 ] / (S + 1)

    All bars of calibrated predictions therefore have the same expected height, for any S and number
    of bins, and for targets that are counts. Bars need not be whole numbers.

    :param draws: ``(S, N, ...)`` of the target, noise included.
    :param y: ``(N, ...)``.
    :raises ValueError: if the shapes do not fit.

    Source: Czado, Gneiting & Held (2009), Predictive model assessment for count data, section 2.1.
    """
    if draws.shape[1:] != y.shape:
        raise ValueError(
            f"y has shape {tuple(y.shape)}, but the draws have {tuple(draws.shape)}: (S, *y.shape) "
            "is needed"
        )
    x, target = draws.detach().double(), y.detach().double()
    size = len(x) + 1
    start = array((x < target).sum(0).flatten())[:, None] / size
    stop = array((x <= target).sum(0).flatten() + 1)[:, None] / size
    edges = np.linspace(0, 1, bins + 1)
    below = np.clip((edges - start) / (stop - start), 0, 1)
    return np.diff(below, axis=1).sum(0)

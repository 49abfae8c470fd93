"""Predictions of posteriors: bands, calibration, and points against those of the reference."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter
from scipy import stats
from torch import Tensor

from pyro_bdl import metrics
from pyro_bdl.diagnostics.rank import quantile_of_sorted, sort
from pyro_bdl.plots.style import (
    GRAY,
    INK,
    array,
    bars,
    check_level,
    check_points,
    check_posteriors,
    diagonal,
    key,
    legend_below,
    panels,
    styles,
    title,
    titled_panels,
)

_MAX_POINTS = 400


def predictive_bands(
    x: Tensor,
    draws: Mapping[str, Tensor],
    *,
    reference: str | None = None,
    x_train: Tensor | None = None,
    y_train: Tensor | None = None,
    level: float = 0.9,
    xlabel: str = "x",
    ylabel: str = "y",
) -> Figure:
    """Mean and central interval along a single input, a panel for each posterior.

    The reference is drawn into each panel as dashed lines.

    :param x: ``(N,)`` or ``(N, 1)``, inputs in any order.
    :param draws: ``(S, N)`` for each posterior, of the function or the target at ``x``.
    :param reference: name of the posterior with which the others are compared; None for no
        reference.
    :param x_train: ``(M,)`` or ``(M, 1)``, training data to show as dots.
    :param y_train: ``(M,)`` or ``(M, 1)``, their targets.
    :param level: share of the draws within the band.
    :param xlabel: label of the horizontal axis, with units.
    :param ylabel: label of the vertical axis, with units.
    :raises ValueError: for no posterior, a reference that is not among them, a level outside (0,
        1), or draws that do not fit x.
    """
    check_posteriors(draws, reference)
    check_level(level)
    grid = array(x.reshape(-1))
    check_points(draws, len(grid))
    order = np.argsort(grid, kind="stable")
    bands = {name: _band(values, level)[:, order] for name, values in draws.items()}
    grid = grid[order]
    shown = [name for name in draws if name != reference] or list(draws)
    look = styles(draws, reference)
    figure, axes = titled_panels(
        shown,
        height=2.3 if len(shown) <= 3 else 1.6,
        xlabel=xlabel,
        ylabel=ylabel,
        looks=look,
        sharey=True,
    )
    for axis, name in zip(axes, shown, strict=True):
        low, mean, high = bands[name]
        color = look[name]["color"]
        axis.fill_between(grid, low, high, color=color, alpha=0.25, linewidth=0)
        axis.plot(grid, mean, color=color, linewidth=2)
        if reference is not None and name != reference:
            low, mean, high = bands[reference]
            axis.plot(grid, mean, color=INK, linewidth=1, linestyle="--")
            axis.plot(grid, low, color=INK, linewidth=1, linestyle=":")
            axis.plot(grid, high, color=INK, linewidth=1, linestyle=":")
        if x_train is not None and y_train is not None:
            points = array(x_train.reshape(-1)), array(y_train.reshape(-1))
            axis.plot(*points, ".", color=INK, markersize=4, alpha=0.6)
    entries: list[tuple[Artist, str]]
    entries = [
        (Patch(color=GRAY, alpha=0.5, linewidth=0), f"mean and {100 * level:.4g} % interval")
    ]
    if reference is not None and shown != [reference]:
        entries += [
            (Line2D([], [], color=INK, linewidth=1, linestyle="--"), f"{reference}: mean"),
            (Line2D([], [], color=INK, linewidth=1, linestyle=":"), f"{reference}: interval"),
        ]
    if x_train is not None and y_train is not None:
        entries.append((Line2D([], [], color=INK, marker=".", linestyle="none"), "training data"))
    legend_below(figure, entries)
    return figure


def _band(values: Tensor, level: float) -> np.ndarray:
    """Lower end, mean and upper end, ``(3, N)``."""
    ordered = sort(values.detach().cpu().double().T.contiguous())
    low = quantile_of_sorted(ordered, (1 - level) / 2)
    high = quantile_of_sorted(ordered, (1 + level) / 2)
    return torch.stack([low, ordered.mean(-1), high]).numpy()


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
    legend_below(figure, axis)
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
    edges = np.linspace(0, 1, bins + 1)
    counts = {name: pit_counts(values, y, bins) for name, values in predictions.items()}
    figure, axes = titled_panels(
        list(predictions), height=1.9, xlabel="PIT", ylabel="test targets", looks=look, sharey=True
    )
    for axis, (name, heights) in zip(axes, counts.items(), strict=True):
        color = look[name]["color"]
        bars(axis, edges, heights, band=(low, high), expected=bar.mean(), color=color)
        axis.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    axes[0].set_ylim(0, 1.1 * max(high, *(heights.max() for heights in counts.values())))
    legend_below(figure, key(level))
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


def function_space(
    draws: Mapping[str, Tensor],
    *,
    reference: str,
    quantity: str = "prediction",
    units: str = "",
) -> Figure:
    """Mean and sd of the function at each test point against those of the reference.

    :param draws: ``(S, N, ...)`` for each posterior. If there are more than 400 numbers at the test
        points, evenly spaced ones are shown.
    :param reference: name of the posterior on the horizontal axis.
    :param quantity: name of the quantity, for the labels.
    :param units: units of the draws, for the labels.
    :raises ValueError: for no other posterior than the reference, or test points that differ in
        shape.
    """
    check_posteriors(draws, reference)
    others = [name for name in draws if name != reference]
    if not others:
        raise ValueError(f"there is no posterior besides the reference {reference!r}")
    check_points(draws)
    look = styles(draws, reference)
    figure, axes = panels(2, height=4.0)
    moments = {name: _moments(values) for name, values in draws.items()}
    unit = f" ({units})" if units else ""
    for axis, index, word in zip(axes, (0, 1), ("mean", "sd"), strict=True):
        at = moments[reference][index]
        for name in others:
            axis.plot(
                at,
                moments[name][index],
                linestyle="none",
                markersize=5,
                markeredgewidth=0,
                alpha=0.55,
                label=name,
                **look[name],
            )
        diagonal(axis)
        title(axis, f"{word} of the {quantity}")
        axis.set_xlabel(f"{reference}{unit}")
        axis.set_ylabel(f"each posterior{unit}")
    legend_below(figure, axes[0])
    return figure


def _moments(values: Tensor) -> tuple[np.ndarray, np.ndarray]:
    flat = values.detach().reshape(values.shape[0], -1)
    if flat.shape[1] > _MAX_POINTS:
        flat = flat[:, torch.linspace(0, flat.shape[1] - 1, _MAX_POINTS, device="cpu").long()]
    flat = flat.double()
    sd = flat.std(0, correction=min(1, flat.shape[0] - 1))
    return array(flat.mean(0)), array(sd)

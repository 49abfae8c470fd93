"""Figures that hold posteriors against each other.

Each function takes a mapping from the names of the posteriors to their predictions and returns a
:class:`matplotlib.figure.Figure` that no global state knows: save it with ``figure.savefig``. The
same names in the same order get the same colours and markers in every figure; the reference is
dark grey. Figures are five inches wide, so that their text can still be read on a phone.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import matplotlib
import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
)
from torch import Tensor

from pyro_bdl import metrics
from pyro_bdl.diagnostics.rank import quantile_of_sorted, sort

_WIDTH = 5.0
_GREY, _INK = "#8a8f98", "#2b2f36"
# Okabe & Ito's colours for all kinds of sight, without the yellow that fades on white.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5195", "#8c564b")
_MARKERS = "os^DvPX<>"
_MAX_POINTS = 400
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 10,
}


def styles(names: Mapping[str, object], reference: str | None = None) -> dict[str, dict]:
    """Colour and marker of each posterior, as keyword arguments of ``Axes.plot``."""
    others = [name for name in names if name != reference]
    chosen = {
        name: {"color": _COLOURS[i % len(_COLOURS)], "marker": _MARKERS[i % len(_MARKERS)]}
        for i, name in enumerate(others)
    }
    return {reference: {"color": _INK, "marker": "*"}, **chosen} if reference else chosen


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
    :param reference: name of the one the others are held against; None for no reference.
    :param x_train: ``(M,)`` or ``(M, 1)``, training data to show as dots.
    :param y_train: ``(M,)`` or ``(M, 1)``, their targets.
    :param level: share of the draws within the band.
    :param xlabel: what is on the horizontal axis, with units.
    :param ylabel: what is on the vertical axis, with units.
    :raises ValueError: for no posterior, a reference that is not among them, or draws that do not
        fit x.
    """
    _check(draws, reference)
    grid = x.detach().reshape(-1).cpu()
    for name, values in draws.items():
        if values.dim() != 2 or values.shape[1] != len(grid):
            raise ValueError(
                f"draws[{name!r}] must have shape (S, {len(grid)}), a number for each x, but has "
                f"{tuple(values.shape)}"
            )
    order = grid.argsort()
    bands = {name: _band(values, level)[:, order] for name, values in draws.items()}
    grid = grid[order]
    panels = [name for name in draws if name != reference] or list(draws)
    look = styles(draws, reference)
    figure, axes = _panels(len(panels), height=2.3, sharex=True, sharey=True)
    for axis, name in zip(axes, panels, strict=True):
        low, mean, high = bands[name]
        colour = look[name]["color"]
        axis.fill_between(grid, low, high, color=colour, alpha=0.25, linewidth=0)
        axis.plot(grid, mean, color=colour, linewidth=2)
        if reference is not None and name != reference:
            low, mean, high = bands[reference]
            axis.plot(grid, mean, color=_INK, linewidth=1, linestyle="--")
            axis.plot(grid, low, color=_INK, linewidth=1, linestyle=":")
            axis.plot(grid, high, color=_INK, linewidth=1, linestyle=":")
        if x_train is not None and y_train is not None:
            axis.plot(*_points(x_train, y_train), ".", color=_INK, markersize=4, alpha=0.6)
        _title(axis, name, colour)
        axis.set_ylabel(ylabel)
    axes[-1].set_xlabel(xlabel)
    key = [
        (Patch(color=_GREY, alpha=0.5, linewidth=0), f"mean and {level:.0%} interval"),
        (Line2D([], [], color=_INK, linewidth=1, linestyle="--"), f"{reference}: mean"),
        (Line2D([], [], color=_INK, linewidth=1, linestyle=":"), f"{reference}: interval"),
        (Line2D([], [], color=_INK, marker=".", linestyle="none"), "training data"),
    ]
    with_reference = reference is not None and panels != [reference]
    shown = [
        key[0],
        *(key[1:3] if with_reference else []),
        *(key[3:] if x_train is not None else []),
    ]
    _legend_below(figure, *zip(*shown, strict=True))
    return figure


def calibration(
    predictions: Mapping[str, Tensor],
    y: Tensor,
    *,
    task: str,
    reference: str | None = None,
    bins: int = 10,
) -> Figure:
    """Regression: coverage of central intervals. Classes: reliability diagram.

    On the diagonal a posterior is calibrated, below it overconfident.

    :param predictions: regression: draws ``(S, N, ...)`` of the target, noise included;
        classification: probabilities ``(N, C)``.
    :param y: ``(N, ...)`` targets or ``(N,)`` class indices.
    :param task: ``"regression"`` or ``"classification"``.
    :param reference: name of the reference, drawn in dark grey.
    :param bins: number of bins of the confidence in a reliability diagram; empty ones are left out.
    :raises ValueError: for no posterior, an unknown task or reference, or shapes that do not fit.
    """
    _check(predictions, reference)
    if task not in ("regression", "classification"):
        raise ValueError(f"task={task!r} is unknown; choose 'regression' or 'classification'")
    figure, (axis,) = _panels(1, height=4.6)
    axis.plot([0, 1], [0, 1], color=_GREY, linewidth=1, linestyle="--", zorder=1)
    look = styles(predictions, reference)
    levels = np.arange(1, 20) / 20
    for name, values in predictions.items():
        where: Any
        found: Any
        if task == "regression":
            where = levels
            found = metrics.interval_coverage(values, y, level=levels.tolist()).cpu().numpy()
        else:
            where, found, share = (t.cpu() for t in metrics.reliability(values, y, bins=bins))
            where, found = where[share > 0].numpy(), found[share > 0].numpy()
        axis.plot(where, found, linewidth=1.5, markersize=5, label=name, **look[name])
    axis.text(0.97, 0.06, "overconfident", ha="right", color=_GREY, fontstyle="italic")
    axis.text(0.03, 0.94, "underconfident", va="center", color=_GREY, fontstyle="italic")
    axis.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    if task == "regression":
        axis.set_xlabel("level of the central interval")
        axis.set_ylabel("share of test targets inside")
    else:
        axis.set_xlabel("confidence of the predicted class")
        axis.set_ylabel("share predicted right")
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_formatter(PercentFormatter(1.0))
        each.set_major_locator(MaxNLocator(5))
    _legend_below(figure, *axis.get_legend_handles_labels())
    return figure


def function_space(
    draws: Mapping[str, Tensor],
    *,
    reference: str,
    quantity: str = "prediction",
    units: str = "",
) -> Figure:
    """Mean and sd of the function at each test point against those of the reference.

    :param draws: ``(S, N, ...)`` for each posterior; of more than 400 numbers at the test points
        evenly spaced ones are shown.
    :param reference: name of the one on the horizontal axis.
    :param quantity: what the draws are, for the labels.
    :param units: units of the draws, for the labels.
    :raises ValueError: for no other posterior than the reference, or test points that differ in
        shape.
    """
    _check(draws, reference)
    others = [name for name in draws if name != reference]
    if not others:
        raise ValueError(f"there is no posterior beside the reference {reference!r}")
    for name in others:
        if draws[name].shape[1:] != draws[reference].shape[1:]:
            raise ValueError(
                f"draws[{name!r}] and draws[{reference!r}] must be at the same test points, but "
                f"have shapes {tuple(draws[name].shape)} and {tuple(draws[reference].shape)}"
            )
    look = styles(draws, reference)
    figure, axes = _panels(2, height=4.0)
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
        _diagonal(axis)
        _title(axis, f"{word} of the {quantity}")
        axis.set_xlabel(f"{reference}{unit}")
        axis.set_ylabel(f"each posterior{unit}")
    _legend_below(figure, *axes[0].get_legend_handles_labels())
    return figure


def cost_against_quality(
    seconds: Mapping[str, float],
    distance: Mapping[str, float],
    *,
    reference: str | None = None,
    floor: float | None = None,
    units: str = "",
) -> Figure:
    """Seconds to fit against the Wasserstein-1 distance to the reference, on log axes.

    :param seconds: wall-clock seconds of each posterior's fit.
    :param distance: distance of each to the reference; the reference itself needs none.
    :param reference: name of the reference, drawn at the floor.
    :param floor: distance between two halves of the reference, drawn as a line.
    :param units: units of the distance.
    :raises ValueError: for a posterior with seconds but no distance that is not the reference.
    """
    missing = [name for name in seconds if name not in distance and name != reference]
    if missing or not seconds:
        raise ValueError(f"distance has no value for {', '.join(map(repr, missing)) or 'anything'}")
    look = styles(seconds, reference)
    figure, (axis,) = _panels(1, height=4.0)
    axis.set_xscale("log")
    axis.set_yscale("log")
    if floor is not None and floor > 0:
        axis.axhline(floor, color=_GREY, linestyle="--", linewidth=1)
        axis.annotate(
            "two halves of the reference" if reference is None else f"two halves of {reference}",
            (0.01, floor),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            color="#6a7079",
            fontsize=9.5,
        )
    for name, cost in seconds.items():
        height = floor if name == reference else distance[name]
        if height is None or not (height > 0 and cost > 0):
            continue
        size = 13 if name == reference else 9
        axis.plot(cost, height, linestyle="none", markersize=size, label=name, **look[name])
    axis.margins(0.15)
    for each in (axis.xaxis, axis.yaxis):
        _plain_log_axis(each)
    axis.set_xlabel("time to fit (s)")
    axis.set_ylabel("distance to the reference" + (f" ({units})" if units else ""))
    _legend_below(figure, *axis.get_legend_handles_labels())
    return figure


# ------------------------------------------------------------------------------------ helpers


def _check(predictions: Mapping[str, Tensor], reference: str | None) -> None:
    if not predictions:
        raise ValueError("there is no posterior to draw")
    if reference is not None and reference not in predictions:
        raise ValueError(
            f"reference={reference!r} is not among the posteriors "
            f"{', '.join(map(repr, predictions))}"
        )


def _panels(count: int, *, height: float, **shared: bool) -> tuple[Figure, list[Axes]]:
    """A white figure with panels below each other."""
    with matplotlib.rc_context(cast(Any, _STYLE)):
        figure = Figure(figsize=(_WIDTH, height * count + 0.5), layout="constrained")
        cast(Any, figure.get_layout_engine()).set(h_pad=0.08, w_pad=0.06)
        figure.set_facecolor("white")
        axes = figure.subplots(count, 1, squeeze=False, **cast(Any, shared))[:, 0]
    return figure, list(axes)


def _band(values: Tensor, level: float) -> np.ndarray:
    """Lower end, mean and upper end, ``(3, N)``."""
    ordered = sort(values.detach().cpu().double().T.contiguous())
    low = quantile_of_sorted(ordered, (1 - level) / 2)
    high = quantile_of_sorted(ordered, (1 + level) / 2)
    return torch.stack([low, ordered.mean(-1), high]).numpy()


def _moments(values: Tensor) -> tuple[np.ndarray, np.ndarray]:
    flat = values.detach().reshape(values.shape[0], -1)
    if flat.shape[1] > _MAX_POINTS:
        flat = flat[:, torch.linspace(0, flat.shape[1] - 1, _MAX_POINTS).long()]
    flat = flat.cpu().double()
    sd = flat.std(0, correction=min(1, flat.shape[0] - 1))
    return flat.mean(0).numpy(), sd.numpy()


def _points(x: Tensor, y: Tensor) -> tuple[np.ndarray, np.ndarray]:
    return x.detach().reshape(-1).cpu().numpy(), y.detach().reshape(-1).cpu().numpy()


def _diagonal(axis: Axes) -> None:
    """Equal limits on both axes, with the line of equality."""
    axis.margins(0.05)
    limits = np.array([axis.get_xlim(), axis.get_ylim()])
    low, high = limits[:, 0].min(), limits[:, 1].max()
    axis.plot([low, high], [low, high], color=_GREY, linestyle="--", linewidth=1, zorder=1)
    axis.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_locator(MaxNLocator(5))


def _plain_log_axis(axis: Axis) -> None:
    """Ticks at 1, 2, 5 within short ranges, at powers of ten within long ones, as plain numbers."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _title(axis: Axes, text: str, colour: str = _INK) -> None:
    axis.set_title(text, loc="left", fontsize=11, fontweight="bold", color=colour)


def _legend_below(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    columns = max(1, min(3, len(labels), 54 // (max(map(len, labels)) + 6)))
    with matplotlib.rc_context(cast(Any, _STYLE)):
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)

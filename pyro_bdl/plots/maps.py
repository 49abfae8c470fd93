"""Maps over two inputs: probabilities of a class, and the sd relative to the reference."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from torch import Tensor

from pyro_bdl.plots.style import (
    COLORS,
    INK,
    SMALL,
    SOFT,
    TEXT,
    WHITE,
    array,
    check_points,
    check_posteriors,
    panels,
    styles,
    title,
)

_LIMIT = 4.0
_TICKS = (0.25, 0.5, 1.0, 2.0, 4.0)
_LEVELS = (0.1, 0.5, 0.9)
_POINTS = (COLORS[0], COLORS[1])  # of the classes 0 and 1
_CLASSES = LinearSegmentedColormap.from_list("classes", (COLORS[0], WHITE, COLORS[1]), N=20)


def sd_ratio(draws: Tensor, reference: Tensor) -> np.ndarray:
    """The posterior's sd over the reference's at each point, ``(N,)``::

        r_n = sqrt( sum_c Var f_c(x_n) / sum_c Var_ref f_c(x_n) ),    c over outputs or classes

    NaN if neither varies; infinite if only the reference does not vary.

    :param draws: ``(S, N, ...)``.
    :param reference: ``(S', N, ...)`` at the same points.
    :raises ValueError: if the points differ in shape.
    """
    if draws.shape[1:] != reference.shape[1:]:
        raise ValueError(
            f"the draws must be at the same points as the reference's, but have shapes "
            f"{tuple(draws.shape)} and {tuple(reference.shape)}"
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt(_variance(draws) / _variance(reference))


def sd_ratio_maps(
    x: Tensor,
    draws: Mapping[str, Tensor],
    *,
    reference: str,
    x_train: Tensor | None = None,
    labels: Sequence[str] = ("first input", "second input"),
) -> Figure:
    """``sd_ratio`` over two inputs, a map for each posterior, on a log scale around 1.

    Points on a full rectangular grid are drawn as tiles, others as dots. Colors end at 1/4 and 4;
    points without a ratio are light gray.

    :param x: ``(N, 2)``, inputs.
    :param draws: ``(S, N, ...)`` for each posterior, of the function at ``x``.
    :param reference: name of the posterior with which the others are compared.
    :param x_train: ``(M, 2)``, training inputs, shown as small dots.
    :param labels: names of the two inputs.
    :raises ValueError: for no other posterior than the reference, inputs that are not two, or draws
        that do not fit them.
    """
    check_posteriors(draws, reference)
    if x.dim() != 2 or x.shape[1] != 2:
        raise ValueError(f"x must have shape (N, 2), but has {tuple(x.shape)}")
    check_points(draws, len(x))
    shown = [name for name in draws if name != reference]
    if not shown:
        raise ValueError(f"there is no posterior besides the reference {reference!r}")
    points = array(x)
    look = styles(draws, reference)
    norm = LogNorm(1 / _LIMIT, _LIMIT)
    colors = matplotlib.colormaps["RdBu"].with_extremes(bad="#d0d4da")
    figure, axes = panels(len(shown), height=2.1, columns=2, sharex=True, sharey=True)
    drawn: ScalarMappable
    for axis, name in zip(axes, shown, strict=True):
        ratio = sd_ratio(draws[name], draws[reference])
        # A log scale would drop zeros, so they are clipped to its lower end.
        ratio = np.where(ratio == 0, np.finfo(float).tiny, ratio)
        grid = _grid(points, ratio)
        if grid is not None:
            drawn = axis.pcolormesh(*grid, norm=norm, cmap=colors, shading="nearest")
        else:
            drawn = axis.scatter(
                points[:, 0],
                points[:, 1],
                c=ratio,
                norm=norm,
                cmap=colors,
                s=24 if len(points) < 300 else 10,
                edgecolors=INK,
                linewidths=0.25,
                plotnonfinite=True,
            )
        if x_train is not None:
            over = grid is not None  # tiles cover what lies behind them
            axis.plot(
                *array(x_train).T,
                ".",
                color=INK if over else SOFT,
                markersize=5 if over else 3,
                markeredgecolor="white",
                markeredgewidth=0.5 if over else 0,
                alpha=1 if over else 0.6,
                zorder=3 if over else 0,
            )
        title(axis, name, look[name])
    label = f"sd over that of {reference}"
    _finish(figure, axes, drawn, labels, _TICKS, label, extend="both")
    return figure


def probability_maps(
    x: Tensor,
    probabilities: Mapping[str, Tensor],
    *,
    x_train: Tensor | None = None,
    y_train: Tensor | None = None,
    reference: str | None = None,
    labels: Sequence[str] = ("first input", "second input"),
) -> Figure:
    """The probability of class 1 over two inputs, a map for each posterior.

    Lines are drawn where it is 0.1, 0.5 (thick) and 0.9.

    :param x: ``(N, 2)``, inputs that fill a rectangular grid, in any order.
    :param probabilities: ``(N,)`` for each posterior, between 0 and 1.
    :param x_train: ``(M, 2)``, training inputs.
    :param y_train: ``(M,)``, their classes 0 and 1; None shows all alike.
    :param reference: name of the posterior that others are compared with; drawn last.
    :param labels: names of the two inputs.
    :raises ValueError: for no posterior, a reference that is not among them, inputs that do not
        fill a grid, or probabilities that do not fit them.
    """
    check_posteriors(probabilities, reference)
    if x.dim() != 2 or x.shape[1] != 2:
        raise ValueError(f"x must have shape (N, 2), but has {tuple(x.shape)}")
    points = array(x)
    look = styles(probabilities, reference)
    shown = [name for name in probabilities if name != reference]
    shown += [] if reference is None else [reference]
    figure, axes = panels(len(shown), height=2.1, columns=2, sharex=True, sharey=True)
    drawn: ScalarMappable
    for axis, name in zip(axes, shown, strict=True):
        values = array(probabilities[name])
        if values.shape != (len(points),) or not ((values >= 0) & (values <= 1)).all():
            raise ValueError(
                f"probabilities[{name!r}] must have shape ({len(points)},), a number between 0 and "
                f"1 for each row of x, but has {tuple(values.shape)}"
            )
        grid = _grid(points, values)
        if grid is None:
            raise ValueError("x must fill a rectangular grid, as torch.cartesian_prod makes it")
        drawn = axis.pcolormesh(
            *grid, vmin=0, vmax=1, cmap=_CLASSES, shading="nearest", rasterized=True
        )
        axis.contour(*grid, levels=_LEVELS, colors=INK, linewidths=(0.7, 1.6, 0.7))
        if x_train is not None:
            classes = np.zeros(len(x_train)) if y_train is None else array(y_train)
            for place, value in enumerate(np.unique(classes)):
                axis.plot(
                    *array(x_train)[classes == value].T,
                    "os"[place % 2],
                    color=_POINTS[place % 2],
                    markersize=4,
                    markeredgecolor=WHITE,
                    markeredgewidth=0.6,
                )
        title(axis, name, look[name])
    _finish(figure, axes, drawn, labels, (0, 0.25, 0.5, 0.75, 1), "probability of class 1")
    return figure


def _finish(
    figure: Figure,
    axes: Sequence[Axes],
    drawn: ScalarMappable,
    labels: Sequence[str],
    ticks: Sequence[float],
    text: str,
    **options: Any,
) -> None:
    """Name the inputs, and add the bar of colors below the maps."""
    for place, axis in enumerate(axes):
        axis.grid(visible=False)
        if place % 2 == 0:
            axis.set_ylabel(labels[1])
    for axis in axes[-2:]:
        axis.set_xlabel(labels[0])
    bar = figure.colorbar(
        drawn, ax=axes, location="bottom", aspect=35, shrink=0.9, ticks=ticks, **options
    )
    bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.ax.xaxis.set_minor_locator(NullLocator())
    bar.ax.tick_params(labelsize=SMALL, colors=INK)
    bar.set_label(text, fontsize=TEXT, color=INK)


def _variance(draws: Tensor) -> np.ndarray:
    values = draws.detach().double()
    variance = values.var(0, correction=0).reshape(values.shape[1], -1).sum(-1)
    return array(variance)


def _grid(points: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, ...] | None:
    """The two axes and the values ``(len(second), len(first))`` if the points fill a grid, else
    None."""
    first, column = np.unique(points[:, 0], return_inverse=True)
    second, row = np.unique(points[:, 1], return_inverse=True)
    filled = np.full((len(second), len(first)), False)
    filled[row, column] = True
    if filled.size != len(points) or not filled.all() or min(filled.shape) < 2:
        return None
    table = np.empty(filled.shape)
    table[row, column] = values
    return first, second, table

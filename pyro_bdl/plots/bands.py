"""Predictive bands along a single input."""

from collections.abc import Mapping

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import Tensor

from pyro_bdl.diagnostics.rank import quantile_of_sorted, sort
from pyro_bdl.plots.style import (
    GRAY,
    INK,
    array,
    check_level,
    check_posteriors,
    columns_for,
    legend_below,
    panels,
    styles,
    title,
)


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
    for name, values in draws.items():
        if values.dim() != 2 or values.shape[1] != len(grid):
            raise ValueError(
                f"draws[{name!r}] must have shape (S, {len(grid)}), a number for each x, but has "
                f"{tuple(values.shape)}"
            )
    order = np.argsort(grid, kind="stable")
    bands = {name: _band(values, level)[:, order] for name, values in draws.items()}
    grid = grid[order]
    shown = [name for name in draws if name != reference] or list(draws)
    look = styles(draws, reference)
    columns = columns_for(len(shown))
    figure, axes = panels(
        len(shown), height=2.3 / columns**0.5, columns=columns, sharex=True, sharey=True
    )
    for place, (axis, name) in enumerate(zip(axes, shown, strict=True)):
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
        title(axis, name, look[name])
        if place % columns == 0:
            axis.set_ylabel(ylabel)
    for axis in axes[-columns:]:
        axis.set_xlabel(xlabel)
    key: list[tuple[Artist, str]]
    key = [(Patch(color=GRAY, alpha=0.5, linewidth=0), f"mean and {100 * level:.4g} % interval")]
    if reference is not None and shown != [reference]:
        key += [
            (Line2D([], [], color=INK, linewidth=1, linestyle="--"), f"{reference}: mean"),
            (Line2D([], [], color=INK, linewidth=1, linestyle=":"), f"{reference}: interval"),
        ]
    if x_train is not None and y_train is not None:
        key.append((Line2D([], [], color=INK, marker=".", linestyle="none"), "training data"))
    legend_below(figure, *zip(*key, strict=True))
    return figure


def _band(values: Tensor, level: float) -> np.ndarray:
    """Lower end, mean and upper end, ``(3, N)``."""
    ordered = sort(values.detach().cpu().double().T.contiguous())
    low = quantile_of_sorted(ordered, (1 - level) / 2)
    high = quantile_of_sorted(ordered, (1 + level) / 2)
    return torch.stack([low, ordered.mean(-1), high]).numpy()

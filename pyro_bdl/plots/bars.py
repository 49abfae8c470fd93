"""Bars of a histogram with the band that uniform counts keep within."""

from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pyro_bdl.plots.style import BAND, GRAY, SOFT


def bars(
    axis: Axes,
    edges: np.ndarray,
    heights: np.ndarray,
    *,
    band: tuple[float, float],
    expected: float,
    color: Any,
) -> None:
    """Bars before the band, whose ends are drawn over them.

    :param edges: ``(B + 1,)`` of the bins.
    :param heights: ``(B,)``.
    :param band: least and greatest count that is no surprise.
    :param expected: count of each bin.
    :param color: of all bars, or of each.
    """
    axis.axhspan(*band, color=BAND, linewidth=0, zorder=0)
    axis.bar(
        edges[:-1],
        heights,
        width=np.diff(edges),
        align="edge",
        color=color,
        edgecolor="white",
        linewidth=0.8,
    )
    for end in band:
        axis.axhline(end, color=SOFT, linewidth=0.8)
    axis.axhline(expected, color=GRAY, linestyle="--", linewidth=1)
    axis.set_xlim(edges[0], edges[-1])
    axis.grid(visible=False)


def room_above(axes: list[Axes], top: float) -> None:
    """Vertical limits from 0 to a little over ``top``."""
    for axis in axes:
        axis.set_ylim(0, 1.1 * top)


def key(level: float) -> list[tuple[Artist, str]]:
    """Entries of the legend for band and line."""
    return [
        (Patch(facecolor=BAND, edgecolor=SOFT, linewidth=0.8), f"{level:.0%} band"),
        (Line2D([], [], color=GRAY, linestyle="--", linewidth=1), "expected"),
    ]

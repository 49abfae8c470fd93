"""Bars of a histogram, with a band for uniform counts."""

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
    """Draw bars in front of the band; the band's ends are drawn over the bars.

    :param edges: edges of the bins, ``(B + 1,)``.
    :param heights: ``(B,)``.
    :param band: the lower and upper end of the band.
    :param expected: expected count of a bin.
    :param color: color of all bars, or one for each bar.
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
    """Set vertical limits from 0 to slightly above ``top``."""
    for axis in axes:
        axis.set_ylim(0, 1.1 * top)


def key(level: float) -> list[tuple[Artist, str]]:
    """Entries of the legend for band and line."""
    return [
        (Patch(facecolor=BAND, edgecolor=SOFT, linewidth=0.8), f"{100 * level:.4g} % band"),
        (Line2D([], [], color=GRAY, linestyle="--", linewidth=1), "expected"),
    ]

"""Helpers of all figures: colors, markers, panels, legends, tensors as arrays."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import offset_copy
from torch import Tensor

WIDTH = 5.0
GRAY, SOFT, INK = "#8a8f98", "#6a7079", "#2b2f36"
BAND, GRID, WHITE = "#dfe3e8", "#e6e8eb", "#ffffff"
# Okabe & Ito's colorblind-safe colors, without the yellow, which is faint on white, and six more.
COLORS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00",
    "#7a5195", "#8c564b", "#8a8d00", "#c2185b", "#00838f", "#5a6fd8",
)  # fmt: skip
MARKERS = "os^DvPX<>phd"
# The same colors where the page is dark.
DARK = {
    GRAY: "#858c96", SOFT: "#a3abb5", INK: "#e6e9ed", BAND: "#333942", GRID: "#2b3037",
    WHITE: "#16191d", "#0072b2": "#4aa8e8", "#d55e00": "#ff8142", "#009e73": "#2fc79a",
    "#cc79a7": "#e69bc5", "#56b4e9": "#8fd3ff", "#e69f00": "#ffc04d", "#7a5195": "#b48ad6",
    "#8c564b": "#c08a7d", "#8a8d00": "#c9cc4a", "#c2185b": "#ff5c98", "#00838f": "#3fc4d0",
    "#5a6fd8": "#93a4ff",
}  # fmt: skip
# The two sizes of all text, in points.
TEXT, SMALL = 10.0, 9.0
_ABOVE = 10.0  # points from a panel's top to the middle of its title
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": TEXT,
    "axes.edgecolor": GRAY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": SMALL,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
}


def use_style() -> None:
    """Give matplotlib's own figures the fonts, colors and width of the figures of this module.

    It sets ``matplotlib.rcParams``, for the notebook or script that calls it; the figures of this
    module look like this without it.
    """
    matplotlib.rcParams.update(
        {
            **_STYLE,
            "axes.prop_cycle": cycler(color=COLORS),
            "axes.titlelocation": "left",
            "axes.titlesize": TEXT,
            "axes.titleweight": "bold",
            "figure.constrained_layout.use": True,
            "figure.dpi": 90,
            "figure.facecolor": WHITE,
            "figure.figsize": (WIDTH, 3.0),
            "image.cmap": "gray",
        }
    )


def styles(names: Iterable[str], reference: str | None = None) -> dict[str, dict[str, Any]]:
    """Color and marker of each posterior, as keyword arguments of ``Axes.plot``.

    The first twelve differ in both; no two of the first 144 are alike in both.
    """
    others = [name for name in names if name != reference]
    kinds = len(COLORS)
    chosen = {
        name: {"color": COLORS[i % kinds], "marker": MARKERS[(i + i // kinds) % kinds]}
        for i, name in enumerate(others)
    }
    return {reference: {"color": INK, "marker": "*"}, **chosen} if reference else chosen


def check_posteriors(given: Mapping[str, object], reference: str | None) -> None:
    """Check the names of posteriors.

    :raises ValueError: for no posterior, or a reference that is not among them.
    """
    if not given:
        raise ValueError("there is no posterior to draw")
    if reference is not None and reference not in given:
        raise ValueError(
            f"reference={reference!r} is not among the posteriors {', '.join(map(repr, given))}"
        )


def check_points(draws: Mapping[str, Tensor], count: int | None = None) -> None:
    """Check that all draws are at the same points.

    :param count: the number of points, if it is known.
    :raises ValueError: if not.
    """
    first = next(iter(draws.values()))
    for name, values in draws.items():
        if values.dim() < 2 or values.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"all draws must be (S, N, ...) at the same test points, but draws[{name!r}] has "
                f"shape {tuple(values.shape)} beside {tuple(first.shape)}"
            )
    if count is not None and first.shape[1] != count:
        raise ValueError(f"there are {count} inputs, but draws of shape {tuple(first.shape)}")


def check_level(level: float) -> None:
    """Check the level of an interval.

    :raises ValueError: for a level outside (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")


def array(values: Tensor) -> np.ndarray:
    """A tensor of any device and dtype as float64 on the CPU."""
    return values.detach().cpu().double().numpy()


def panels(
    count: int, *, height: float, columns: int = 1, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A white figure, five inches wide, with panels in rows of ``columns``; returns figure and
    panels."""
    rows = math.ceil(count / columns)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height * rows + 0.5), layout="constrained")
        cast(Any, figure.get_layout_engine()).set(h_pad=0.08, w_pad=0.06)
        figure.set_facecolor(WHITE)
        axes = figure.subplots(rows, columns, squeeze=False, **shared).ravel()
    for unused in axes[count:]:
        unused.remove()
    if shared.get("sharex"):  # if the last row is not full, the panels above it have labels
        for axis in axes[max(0, count - columns) : count]:
            axis.tick_params(labelbottom=True)
    return figure, list(axes[:count])


def titled_panels(
    names: Sequence[str],
    *,
    height: float,
    xlabel: str = "",
    ylabel: str = "",
    columns: int | None = None,
    looks: Mapping[str, Mapping[str, Any]] | None = None,
    **shared: Any,
) -> tuple[Figure, list[Axes]]:
    """Panels with titles, and labels at the left and below; returns figure and panels.

    :param columns: by default one for a few panels, two for many.
    :param looks: color and marker of each title, from ``styles``.
    """
    columns = (1 if len(names) <= 3 else 2) if columns is None else columns
    figure, axes = panels(len(names), height=height, columns=columns, sharex=True, **shared)
    for place, (axis, name) in enumerate(zip(axes, names, strict=True)):
        title(axis, name, None if looks is None else looks[name])
        if place % columns == 0:
            axis.set_ylabel(ylabel)
    for axis in axes[-columns:]:
        axis.set_xlabel(xlabel)
    return figure, axes


def diagonal(axis: Axes) -> None:
    """Set equal limits on both axes, and draw the line of equality."""
    axis.margins(0.05)
    limits = np.array([axis.get_xlim(), axis.get_ylim()])
    low, high = limits[:, 0].min(), limits[:, 1].max()
    axis.plot([low, high], [low, high], color=GRAY, linestyle="--", linewidth=1, zorder=1)
    axis.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_locator(MaxNLocator(5))


def plain_log_axis(axis: Axis) -> None:
    """Set ticks at 1, 2, 5 for short ranges, at powers of ten for long ones, as plain numbers."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def title(axis: Axes, text: str, look: Mapping[str, Any] | None = None) -> None:
    """Set a left-aligned title, with the posterior's marker before it.

    :param look: the posterior's color and marker, from ``styles``; None for a plain title.
    """
    drawn = axis.set_title(text, loc="left", fontsize=TEXT, fontweight="bold", color=INK)
    if look is None:
        return
    figure = axis.figure.figure
    drawn.set_transform(offset_copy(drawn.get_transform(), figure, x=14, units="points"))
    place = offset_copy(axis.transAxes, figure, x=5, y=_ABOVE, units="points")
    axis.plot(
        0, 1, transform=place, clip_on=False, markersize=7, linestyle="none", scalex=False,
        scaley=False, **look,
    )  # fmt: skip


def legend_below(figure: Figure, entries: Sequence[tuple[Artist, str]] | Axes) -> None:
    """Add a legend below all panels, in as many columns as fit; none without labels.

    :param entries: artists and labels, or a panel with labeled lines.
    """
    if isinstance(entries, Axes):
        entries = list(zip(*entries.get_legend_handles_labels(), strict=True))
    if not entries:
        return
    handles, labels = zip(*entries, strict=True)
    columns = max(1, min(3, len(labels), 60 // (max(map(len, labels)) + 6)))
    with matplotlib.rc_context(_STYLE):
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)


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


def key(level: float) -> list[tuple[Artist, str]]:
    """Entries of the legend for band and line."""
    return [
        (Patch(facecolor=BAND, edgecolor=SOFT, linewidth=0.8), f"{100 * level:.4g} % band"),
        (Line2D([], [], color=GRAY, linestyle="--", linewidth=1), "expected"),
    ]

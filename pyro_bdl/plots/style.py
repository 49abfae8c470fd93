"""The look of all figures: colors, marks, panels, legends, tensors as arrays."""

import math
import sys
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
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
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
    module look like this without it. In a notebook all figures have twice the pixels, for sharp
    screens.

    Example::

        >>> from matplotlib import pyplot
        >>> bdl.plots.use_style()
        >>> figure, axes = pyplot.subplots()
        >>> lines = axes.plot([0, 1], [1, 0])
        >>> float(figure.get_figwidth())  # inches
        5.0
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
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("retina")


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


def check_posteriors(posteriors: Mapping[str, object], reference: str | None) -> None:
    """Check that there are posteriors to draw, and that the reference is one of them.

    :raises ValueError: if not.
    """
    if not posteriors or not (reference is None or reference in posteriors):
        raise ValueError(
            f"reference={reference!r} must be among the posteriors, which are: "
            f"{', '.join(posteriors) or 'none'}"
        )


def check_points(values: Mapping[str, Tensor], count: int) -> None:
    """Check that draws ``(S, N, ...)`` are at N points.

    :raises ValueError: if not.
    """
    for name, draws in values.items():
        if draws.dim() < 2 or draws.shape[1] != count:
            raise ValueError(
                f"draws[{name!r}] must be (S, {count}, ...), at the {count} inputs, but has shape "
                f"{tuple(draws.shape)}"
            )


def array(values: Tensor) -> np.ndarray:
    """A tensor of any device and dtype as float64 on the CPU."""
    return values.detach().cpu().double().numpy()


def panels(
    titles: Sequence[str],
    height: float,
    *,
    columns: int | None = None,
    xlabel: str = "",
    ylabel: str = "",
    looks: Mapping[str, Mapping[str, Any]] | None = None,
    **shared: Any,
) -> tuple[Figure, list[Axes]]:
    """A white figure, five inches wide, and its panels.

    :param titles: of the panels; empty for none.
    :param height: of a panel, in inches.
    :param columns: by default one for up to three panels, two for more.
    :param xlabel: at the lowest panels; ``ylabel`` at the left ones.
    :param looks: color and marker of each title, from :func:`styles`.
    :param shared: ``sharex``, ``sharey``.
    """
    count = len(titles)
    columns = (1 if count <= 3 else 2) if columns is None else columns
    rows = math.ceil(count / columns)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height * rows + 0.5), layout="constrained")
        cast(Any, figure.get_layout_engine()).set(h_pad=0.08, w_pad=0.06)
        figure.set_facecolor(WHITE)
        axes = figure.subplots(rows, columns, squeeze=False, **shared).ravel()
    for unused in axes[count:]:
        unused.remove()
    for place, (axis, text) in enumerate(zip(axes, titles, strict=False)):
        _title(axis, text, looks[text] if looks else None)
        if place % columns == 0:
            axis.set_ylabel(ylabel)
        if place >= count - columns:  # also above a last row that is not full
            axis.set_xlabel(xlabel)
            axis.tick_params(labelbottom=True)
    return figure, list(axes[:count])


def _title(axis: Axes, text: str, look: Mapping[str, Any] | None) -> None:
    """A title at the left, with the posterior's marker before it."""
    title = axis.set_title(text, loc="left", fontsize=TEXT, fontweight="bold", color=INK)
    if look is None:
        return
    figure = axis.figure.figure
    title.set_transform(offset_copy(title.get_transform(), figure, x=14, units="points"))
    place = offset_copy(axis.transAxes, figure, x=5, y=_ABOVE, units="points")
    axis.plot(
        0, 1, transform=place, clip_on=False, markersize=7, linestyle="none", scalex=False,
        scaley=False, **look,
    )  # fmt: skip


def plain_log_axis(axis: Axis) -> None:
    """Set ticks at 1, 2, 5 for short ranges, at powers of ten for long ones, as plain numbers."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def entry(label: str, **look: Any) -> Line2D:
    """An entry of a legend: a line or marker of this look."""
    return Line2D([], [], label=label, **look)


def legend_below(figure: Figure, entries: Sequence[Artist] | Axes) -> None:
    """Add a legend below all panels, in as many columns as fit; none without entries.

    :param entries: artists with their labels, or a panel with labeled lines.
    """
    artists = entries.get_legend_handles_labels()[0] if isinstance(entries, Axes) else entries
    if not artists:
        return
    longest = max(len(str(artist.get_label())) for artist in artists)
    columns = max(1, min(3, len(artists), 60 // (longest + 6)))
    with matplotlib.rc_context(_STYLE):
        figure.legend(handles=artists, loc="outside lower center", ncols=columns)

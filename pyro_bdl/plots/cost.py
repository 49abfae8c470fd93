"""Time to fit against the distance to the reference."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from pyro_bdl.plots.style import BAND, GRAY, INK, SMALL, SOFT, panels, plain_log_axis, styles

# Where a label may stand: the side of its marker, in points, with its alignment.
_SIDES = (
    (8, 0, "left", "center"), (-8, 0, "right", "center"),
    (0, 7, "center", "bottom"), (0, -7, "center", "top"),
    (6, 6, "left", "bottom"), (-6, 6, "right", "bottom"),
    (6, -6, "left", "top"), (-6, -6, "right", "top"),
    (0, 19, "center", "bottom"), (0, -19, "center", "top"),
    (14, 16, "left", "bottom"), (-14, 16, "right", "bottom"),
    (14, -16, "left", "top"), (-14, -16, "right", "top"),
)  # fmt: skip
_MARK = 6.0  # points from the middle of a marker to its edge


def cost_against_quality(
    seconds: Mapping[str, float],
    distance: Mapping[str, float],
    *,
    reference: str | None = None,
    floor: float | None = None,
    errors: Mapping[str, float] | None = None,
    units: str = "",
) -> Figure:
    """Seconds to fit against the Wasserstein-1 distance to the reference, on log axes.

    Each marker has its name beside it. Below the floor the area is shaded: a posterior there cannot
    be told from the reference.

    :param seconds: wall-clock seconds of each posterior's fit.
    :param distance: distance of each to the reference; the reference itself needs none.
    :param reference: name of the reference, drawn at the floor.
    :param floor: distance between two halves of the reference, drawn as a line.
    :param errors: Monte Carlo errors of the distances; two of them are drawn each way.
    :param units: units of the distance.
    :raises ValueError: for a posterior other than the reference that has seconds but no distance.
    """
    missing = [name for name in seconds if name not in distance and name != reference]
    if missing or not seconds:
        raise ValueError(f"distance has no value for {', '.join(map(repr, missing)) or 'anything'}")
    look = styles(seconds, reference)
    figure, (axis,) = panels(1, height=4.2)
    axis.set_xscale("log")
    axis.set_yscale("log")
    places: dict[str, tuple[float, float]] = {}
    for name, cost in seconds.items():
        height = floor if name == reference else distance[name]
        if height is None or not (height > 0 and cost > 0):
            continue
        places[name] = cost, height
        error = 2 * (errors or {}).get(name, 0.0)
        if error > 0:
            ends = [max(height - error, height / 10), height + error]
            axis.plot([cost, cost], ends, color=look[name]["color"], linewidth=1)
        size = 13 if name == reference else 9
        axis.plot(cost, height, linestyle="none", markersize=size, label=name, **look[name])
    axis.margins(0.15)
    for each in (axis.xaxis, axis.yaxis):
        plain_log_axis(each)
    axis.set_xlabel("time to fit (s)")
    axis.set_ylabel("distance to the reference" + (f" ({units})" if units else ""))
    axis.autoscale_view()
    if floor is not None and floor > 0:
        low, high = axis.get_ylim()
        limits = min(low, 0.7 * floor), high
        axis.axhspan(limits[0], floor, color=BAND, alpha=0.5, linewidth=0, zorder=0)
        axis.axhline(floor, color=GRAY, linestyle="--", linewidth=1)
        axis.set_ylim(limits)
        axis.annotate(
            "two halves of the reference" if reference is None else f"two halves of {reference}",
            (0.01, floor),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            color=SOFT,
            fontsize=SMALL,
        )
    _name(axis, places)
    return figure


def _name(axis: Axes, places: Mapping[str, tuple[float, float]]) -> None:
    """Write each name beside its marker, where it covers the least of the others."""
    figure = axis.figure
    canvas = FigureCanvasAgg(figure.figure)  # type: ignore[arg-type]
    figure.draw_without_rendering()  # type: ignore[union-attr]
    scale = figure.dpi / 72
    inside = axis.get_window_extent()
    taken = [text.get_window_extent(canvas.get_renderer()) for text in axis.texts]
    taken += [
        Bbox.from_bounds(x - reach, y - reach, 2 * reach, 2 * reach)
        for x, y in axis.transData.transform(np.reshape(list(places.values()), (-1, 2)))
        for reach in [_MARK * scale]
    ]
    for name, place in places.items():
        label = axis.annotate(
            name, place, textcoords="offset points", xytext=(0, 0), fontsize=SMALL, color=INK
        )
        label.set_in_layout(False)
        costs = []
        for right, up, across, upright in _SIDES:
            label.set(position=(right, up), horizontalalignment=across, verticalalignment=upright)
            box = label.get_window_extent(canvas.get_renderer())
            common = [each for other in taken if (each := Bbox.intersection(box, other))]
            kept = Bbox.intersection(box, inside)
            shown = 0.0 if kept is None else kept.width * kept.height
            outside = box.width * box.height - shown
            costs.append(sum(each.width * each.height for each in common) + 3 * outside)
        right, up, across, upright = _SIDES[int(np.argmin(costs))]
        label.set(position=(right, up), horizontalalignment=across, verticalalignment=upright)
        taken.append(label.get_window_extent(canvas.get_renderer()))

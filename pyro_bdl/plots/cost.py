"""Time to fit against the distance to the reference."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from pyro_bdl.plots.style import GRAY, SOFT, legend_below, panels, plain_log_axis, styles


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
    :raises ValueError: for a posterior other than the reference that has seconds but no distance.
    """
    missing = [name for name in seconds if name not in distance and name != reference]
    if missing or not seconds:
        raise ValueError(f"distance has no value for {', '.join(map(repr, missing)) or 'anything'}")
    look = styles(seconds, reference)
    figure, (axis,) = panels(1, height=4.0)
    axis.set_xscale("log")
    axis.set_yscale("log")
    if floor is not None and floor > 0:
        axis.axhline(floor, color=GRAY, linestyle="--", linewidth=1)
        axis.annotate(
            "two halves of the reference" if reference is None else f"two halves of {reference}",
            (0.01, floor),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            color=SOFT,
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
        plain_log_axis(each)
    axis.set_xlabel("time to fit (s)")
    axis.set_ylabel("distance to the reference" + (f" ({units})" if units else ""))
    legend_below(figure, *axis.get_legend_handles_labels())
    return figure

"""Posteriors against time to fit and against temperature."""

from collections.abc import Collection, Mapping, Sequence

from matplotlib.figure import Figure

from pyro_bdl.plots.style import (
    BAND,
    GRAY,
    SMALL,
    SOFT,
    legend_below,
    panels,
    plain_log_axis,
    styles,
    titled_panels,
)

_BAYES = "#c0392b"


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

    Below the floor the area is shaded: a posterior there cannot
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
    for name, cost in seconds.items():
        height = floor if name == reference else distance[name]
        if height is None or not (height > 0 and cost > 0):
            continue
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
    legend_below(figure, axis)
    return figure


def temperature_curves(
    scores: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    *,
    marks: Mapping[str, float] | None = None,
    logarithmic: Collection[str] = (),
    label: str = "temperature eta",
    line: float | None = 1.0,
) -> Figure:
    """A panel for each score, with a curve for each network over the temperature on a log axis.

    :param scores: title of the panel -> name of the curve -> temperatures and values.
    :param marks: name of a curve -> a temperature that is marked by a dashed line in its color,
        such as tau p / N.
    :param logarithmic: titles of panels with a log axis of the values.
    :param label: label of the temperature's axis.
    :param line: a temperature that is a red line in all panels, by default that of the Bayesian
        posterior; None for no line.
    :raises ValueError: without scores, or for curves without points.
    """
    names = list(dict.fromkeys(name for curves in scores.values() for name in curves))
    if not names or any(not t for curves in scores.values() for t, _ in curves.values()):
        raise ValueError("scores has no curve, or a curve without points")
    look = styles(names)
    figure, axes = titled_panels(list(scores), height=2.6, xlabel=label)
    for axis, (heading, curves) in zip(axes, scores.items(), strict=True):
        axis.set_xscale("log")
        if heading in logarithmic:
            axis.set_yscale("log")
        if line is not None:
            axis.axvline(line, color=_BAYES, linewidth=1.2, zorder=1)
        for name, (temperatures, values) in curves.items():
            axis.plot(temperatures, values, markersize=4, linewidth=1.3, label=name, **look[name])
            if marks and name in marks:
                color = look[name]["color"]
                axis.axvline(marks[name], color=color, linestyle="--", linewidth=0.9, zorder=1)
    legend_below(figure, axes[0])
    return figure

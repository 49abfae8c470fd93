"""Scores of posteriors against the temperature that they were trained at."""

from collections.abc import Collection, Mapping, Sequence

from matplotlib.figure import Figure

from pyro_bdl.plots.style import columns_for, legend_below, panels, styles, title

_BAYES = "#c0392b"


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
    columns = columns_for(len(scores))
    figure, axes = panels(len(scores), height=2.6, columns=columns, sharex=True)
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
        title(axis, heading)
    for axis in axes[-columns:]:
        axis.set_xlabel(label)
    legend_below(figure, *axes[0].get_legend_handles_labels())
    return figure

"""Intervals of single numbers, cost against distance, and scores against temperature."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from pyro_bdl.plots.style import (
    BAND,
    GRAY,
    SMALL,
    SOFT,
    WHITE,
    array,
    check_posteriors,
    entry,
    legend_below,
    panels,
    plain_log_axis,
    styles,
)

_BAYES = "#c0392b"
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def intervals(
    draws: Mapping[str, Mapping[str, Tensor]], *, reference: str | None = None, label: str = ""
) -> Figure:
    """Median, 50 % and 90 % interval of each quantity, one row for each posterior.

    The shaded column is the reference's 90 % interval.

    :param draws: posterior to quantity to ``(S, ...)`` draws, as ``Predictive(model, posterior)(x,
        sites=[...])`` gives them; a quantity of several numbers has a panel for each, as
        ``theta[0]``. A posterior may lack some quantities.
    :param reference: name of the posterior with which the others are compared.
    :param label: label of the horizontal axes, with units.
    :raises ValueError: for no posterior or quantity, or an unknown reference.
    """
    check_posteriors(draws, reference)
    numbers = {name: _by_number(values) for name, values in draws.items()}
    quantities = list(dict.fromkeys(key for values in numbers.values() for key in values))
    if not quantities:
        raise ValueError("there is no quantity to draw")
    looks = styles(draws, reference)
    # titles of neighbors would run into each other: each part has a line of its own
    titles = [q.replace(", ", ",\n") if len(quantities) > 1 else q for q in quantities]
    figure, axes = panels(
        titles, 0.55 + 0.24 * len(draws), columns=min(2, len(titles)), xlabel=label, sharey=True
    )
    for axis, quantity in zip(axes, quantities, strict=True):
        for row, (name, values) in enumerate(numbers.items()):
            if quantity not in values:
                continue
            low, lower, middle, upper, high = np.quantile(values[quantity], _QUANTILES)
            color = looks[name]["color"]
            if name == reference:
                axis.axvspan(low, high, color=BAND, linewidth=0, zorder=0)
            axis.plot([low, high], [row, row], color=color, linewidth=1.2)
            axis.plot([lower, upper], [row, row], color=color, linewidth=3.5, solid_capstyle="butt")
            axis.plot(middle, row, markersize=7, markeredgecolor=WHITE, **looks[name])
        axis.use_sticky_edges = False  # the shaded column may reach farthest
        axis.grid(visible=False, axis="y")
        axis.xaxis.set_major_locator(MaxNLocator(4))
    axes[0].set_yticks(range(len(draws)), draws)
    axes[0].set_ylim(len(draws) - 0.5, -0.5)
    half = entry("median, 50 % interval", color=GRAY, linewidth=3.5, marker="o")
    legend_below(figure, [half, entry("90 % interval", color=GRAY, linewidth=1.2)])
    return figure


def _by_number(values: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Each number of each quantity, ``(S,)``, by its name and index."""
    numbers = {}
    for name, tensor in values.items():
        value = array(tensor)
        for index in np.ndindex(value.shape[1:]):
            title = f"{name}[{','.join(map(str, index))}]" if index else name
            numbers[title] = value[(slice(None), *index)]
    return numbers


def cost_against_quality(
    seconds: Mapping[str, float],
    distance: Mapping[str, float],
    *,
    reference: str | None = None,
    floor: float | None = None,
    errors: Mapping[str, float] | None = None,
) -> Figure:
    """Seconds to fit against the Wasserstein-1 distance to the reference, on log axes.

    Below the floor the area is shaded: a posterior there may be the reference itself.

    :param seconds: wall-clock seconds of each posterior's fit.
    :param distance: distance of each to the reference; the reference itself needs none.
    :param reference: name of the reference, drawn at the floor.
    :param floor: distance between two halves of the reference, drawn as a line.
    :param errors: Monte Carlo errors of the distances; two of them are drawn each way.
    :raises ValueError: for a posterior other than the reference that has seconds but no distance.
    """
    missing = [name for name in seconds if name not in distance and name != reference]
    if missing or not seconds:
        raise ValueError(f"distance has no value for {', '.join(map(repr, missing)) or 'anything'}")
    looks = styles(seconds, reference)
    figure, (axis,) = panels([""], 4.2)
    axis.set(xscale="log", yscale="log")
    for name, cost in seconds.items():
        height = floor if name == reference else distance[name]
        if height is None or not (height > 0 and cost > 0):
            continue
        error = 2 * (errors or {}).get(name, 0.0)
        if error > 0:
            ends = [max(height - error, height / 10), height + error]
            axis.plot([cost, cost], ends, color=looks[name]["color"], linewidth=1)
        size = 13 if name == reference else 9
        axis.plot(cost, height, linestyle="none", markersize=size, label=name, **looks[name])
    axis.margins(0.15)
    for each in (axis.xaxis, axis.yaxis):
        plain_log_axis(each)
    axis.set(xlabel="time to fit (s)", ylabel="distance to the reference")
    axis.autoscale_view()
    if floor is not None and floor > 0:
        low, high = axis.get_ylim()
        low = min(low, 0.7 * floor)
        axis.axhspan(low, floor, color=BAND, alpha=0.5, linewidth=0, zorder=0)
        axis.axhline(floor, color=GRAY, linestyle="--", linewidth=1)
        axis.set_ylim(low, high)
        axis.annotate(
            f"two halves of {reference or 'the reference'}",
            (0.01, floor),
            xycoords=("axes fraction", "data"),
            xytext=(0, -9),  # below the reference's mark
            textcoords="offset points",
            va="top",
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
    looks = styles(names)
    figure, axes = panels(list(scores), 2.6, xlabel=label, sharex=True)
    for axis, (heading, curves) in zip(axes, scores.items(), strict=True):
        axis.set_xscale("log")
        if heading in logarithmic:
            axis.set_yscale("log")
        if line is not None:
            axis.axvline(line, color=_BAYES, linewidth=1.2, zorder=1)
        for name, (temperatures, values) in curves.items():
            axis.plot(temperatures, values, markersize=4, linewidth=1.3, label=name, **looks[name])
            if marks and name in marks:
                color = looks[name]["color"]
                axis.axvline(marks[name], color=color, linestyle="--", linewidth=0.9, zorder=1)
    legend_below(figure, axes[0])
    return figure

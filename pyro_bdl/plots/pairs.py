"""Pairs of quantities, such as hyperparameters, against each other."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from pyro_bdl.plots.style import array, check_posteriors, legend_below, panels, styles, title

_MOST = 6
_DOTS = 500
_BINS = 25


def pairs(draws: Mapping[str, Mapping[str, Tensor]], *, reference: str | None = None) -> Figure:
    """Densities on the diagonal, draws of each pair below it.

    At most 500 evenly spaced draws are shown as dots; the densities use all draws. Draws that are
    all equal are shown as a line and one dot.

    :param draws: posterior to quantity to ``(S,)`` draws, the same quantities for all, at most 6.
    :param reference: name of the posterior with which the others are compared.
    :raises ValueError: for no posterior or quantity, an unknown reference, more than 6 quantities,
        or posteriors that differ in quantities.
    """
    check_posteriors(draws, reference)
    names = list(next(iter(draws.values())))
    if not 1 <= len(names) <= _MOST:
        raise ValueError(f"pairs draws 1 to {_MOST} quantities, got {len(names)}: choose some")
    for posterior, values in draws.items():
        if set(values) != set(names):
            raise ValueError(
                f"draws[{posterior!r}] has the quantities {', '.join(values) or 'none'}, but the "
                f"first posterior has {', '.join(names)}"
            )
    numbers = {q: {name: array(draws[q][name]) for name in names} for q in draws}
    look = styles(draws, reference)
    count = len(names)
    figure, axes = panels(
        count**2, height=3.2 if count == 1 else 4.6 / count, columns=count, sharex="col"
    )
    for place, axis in enumerate(axes):
        row, column = divmod(place, count)
        if column > row:
            axis.remove()
            continue
        for posterior, drawn in numbers.items():
            color = look[posterior]["color"]
            if row == column:
                _density(axis, drawn[names[row]], color)
            else:
                chosen = _thinned(len(drawn[names[row]]))
                x, y = drawn[names[column]][chosen], drawn[names[row]][chosen]
                mark = look[posterior]["marker"]
                axis.plot(x, y, mark, color=color, markersize=3, alpha=0.5, markeredgewidth=0)
        axis.grid(visible=False)
        axis.margins(0.08)
        for each in (axis.xaxis, axis.yaxis):
            each.set_major_locator(MaxNLocator(3))
        if row == column:
            axis.set_yticks([])
            axis.set_ylim(bottom=0)
            title(axis, names[row])
        if row == count - 1:
            axis.set_xlabel(names[column])
        else:
            axis.tick_params(labelbottom=False)
        if column == 0 and row:
            axis.set_ylabel(names[row])
        elif column:
            axis.tick_params(labelleft=False)
    key = [(Line2D([], [], linewidth=2.5, **look[q]), q) for q in draws]
    legend_below(figure, *zip(*key, strict=True))
    return figure


def _density(axis: Axes, values: np.ndarray, color: str) -> None:
    """Draw a histogram of area 1, or a line if all values are equal."""
    if np.ptp(values) == 0:
        axis.axvline(values[0], color=color, linewidth=1.6)
    else:
        heights, edges = np.histogram(values, bins=_BINS, density=True)
        axis.stairs(heights, edges, color=color, linewidth=1.6)


def _thinned(count: int) -> np.ndarray:
    """Evenly spaced positions, at most 500."""
    shown = min(count, _DOTS)
    return np.arange(shown) * count // shown

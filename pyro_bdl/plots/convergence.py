"""Convergence of every site of a network in one figure."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from pyro_bdl.diagnostics.summary import Summary
from pyro_bdl.plots.style import COLORS, array, legend_below, panels, plain_log_axis, title

_MOST = 40
_LEVELS = (0, 0.25, 0.5, 0.75, 1)


def convergence(summary: Summary) -> Figure:
    """Median, middle half and range of R-hat and bulk ESS over the numbers of each site.

    The dashed lines are the summary's limits. If there are more than 40 sites, those with the
    largest R-hats are shown, in the order of the program.

    :param summary: the result of ``diagnostics.summary``.
    :raises ValueError: if no site has an R-hat, as with constants or a single chain.
    """
    known = {
        site: (_known(found.rhat), _known(found.ess_bulk))
        for site, found in summary.by_site.items()
    }
    known = {site: both for site, both in known.items() if len(both[0])}
    if not known:
        raise ValueError("no site has an R-hat: all are constant, or of a single chain")
    worst = sorted(known, key=lambda site: -known[site][0].max(initial=0.0))[:_MOST]
    shown = [site for site in known if site in worst]
    figure, (left, right) = panels(2, height=0.9 + 0.24 * len(shown), columns=1, sharey=True)
    for row, site in enumerate(shown):
        for axis, values in zip((left, right), known[site], strict=True):
            if len(values):
                _draw(axis, row, np.quantile(values, _LEVELS))
    left.axvline(summary.rhat_limit, color=COLORS[1], linestyle="--", linewidth=1.2)
    right.axvline(summary.ess_limit, color=COLORS[1], linestyle="--", linewidth=1.2)
    title(left, "R-hat, to the left of the line is good")
    title(right, "effective draws (bulk ESS), to the right is good")
    right.set_xscale("log")
    plain_log_axis(right.xaxis)
    for axis in (left, right):
        axis.grid(visible=False, axis="y")
        axis.set_yticks(range(len(shown)), shown, fontsize=9)
    left.set_ylim(len(shown) - 0.5, -0.5)
    key = [
        (Line2D([], [], color=COLORS[0], linewidth=3.5, marker="o"), "median, middle half"),
        (Line2D([], [], color=COLORS[0], linewidth=1.2), "range"),
        (Line2D([], [], color=COLORS[1], linestyle="--", linewidth=1.2), "limit"),
    ]
    legend_below(figure, *zip(*key, strict=True))
    return figure


def _known(values: Tensor) -> np.ndarray:
    numbers = array(values).ravel()
    return numbers[np.isfinite(numbers)]


def _draw(axis: Axes, row: int, quantiles: np.ndarray) -> None:
    low, lower, middle, upper, high = quantiles
    axis.plot([low, high], [row, row], color=COLORS[0], linewidth=1.2)
    axis.plot([lower, upper], [row, row], color=COLORS[0], linewidth=3.5)
    axis.plot(middle, row, "o", color=COLORS[0], markersize=5, markeredgecolor="white")

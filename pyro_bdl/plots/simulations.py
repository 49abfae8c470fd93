"""Rank histograms of simulation-based calibration."""

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pyro_bdl.plots.bars import bars as draw_bars
from pyro_bdl.plots.bars import key, room_above
from pyro_bdl.plots.style import (
    COLORS,
    array,
    check_level,
    columns_for,
    legend_below,
    panels,
    title,
)

if TYPE_CHECKING:
    from pyro_bdl.calibration.simulation import Calibration

_INSIDE, _OUTSIDE = COLORS[0], COLORS[1]


def rank_histograms(
    calibration: "Calibration", *, bins: int | None = None, level: float = 0.99
) -> Figure:
    """Histograms of the truth's ranks among the posterior draws, a panel for each quantity.

    They are flat if inference is exact, valleys if the posterior is too narrow, hills if it is too
    wide, and slopes if it is biased. If the ranks are uniform, a bar lies within the band with
    probability ``level``; bars outside the band have another color.

    :param calibration: the result of ``simulation_based_calibration``.
    :param bins: number of bins of each histogram, preferably a divisor of the number of ranks; by
        default up to 20.
    :param level: probability of the band, see ``Calibration.band``.
    :raises ValueError: for more bins than ranks, or a level outside (0, 1).

    Source: Talts et al. (2018), Validating Bayesian inference algorithms with SBC, section 5.1.
    """
    check_level(level)
    bins = calibration.bins if bins is None else bins
    counts = array(calibration.counts(bins))
    low, high = calibration.band(level, bins)
    expected = len(calibration.ranks) / bins
    edges = np.linspace(0, calibration.num_draws + 1, bins + 1)
    columns = columns_for(len(counts))
    figure, axes = panels(len(counts), height=1.9, columns=columns, sharex=True, sharey=True)
    for place, (axis, name, heights) in enumerate(
        zip(axes, calibration.names, counts, strict=True)
    ):
        outside = (heights < low) | (heights > high)
        colors = np.where(outside, _OUTSIDE, _INSIDE)
        draw_bars(axis, edges, heights, band=(low, high), expected=expected, color=colors)
        title(axis, name)
        if place % columns == 0:
            axis.set_ylabel("simulations")
    for axis in axes[-columns:]:
        axis.set_xlabel("rank of the truth")
    room_above(axes, max(high, counts.max()))
    entries = [*key(level), (Patch(color=_OUTSIDE, linewidth=0), "outside the band")]
    legend_below(figure, *zip(*entries, strict=True))
    return figure

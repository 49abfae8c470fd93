"""Rank histograms of simulation-based calibration."""

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pyro_bdl.plots.bars import bars as draw_bars
from pyro_bdl.plots.bars import key, room_above
from pyro_bdl.plots.style import (
    COLOURS,
    array,
    check_level,
    columns_for,
    legend_below,
    panels,
    title,
)

if TYPE_CHECKING:
    from pyro_bdl.calibration.simulation import Calibration

_INSIDE, _OUTSIDE = COLOURS[0], COLOURS[1]


def rank_histograms(
    calibration: "Calibration", *, bins: int | None = None, level: float = 0.99
) -> Figure:
    """How often the truth had which rank among the posterior draws, a panel for each quantity.

    Flat where inference is exact; a valley where the posterior is too narrow, a hill where it is
    too wide, a slope where it is biased. The band holds a bar with probability ``level`` where the
    ranks are uniform; bars that leave it have another colour.

    :param calibration: what ``simulation_based_calibration`` returned.
    :param bins: of each histogram, at best a divisor of the possible ranks; by default up to 20.
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
        colours = np.where(outside, _OUTSIDE, _INSIDE)
        draw_bars(axis, edges, heights, band=(low, high), expected=expected, color=colours)
        title(axis, name, small=columns > 1)
        if place % columns == 0:
            axis.set_ylabel("simulations")
    for axis in axes[-columns:]:
        axis.set_xlabel("rank of the truth")
    room_above(axes, max(high, counts.max()))
    entries = [*key(level), (Patch(color=_OUTSIDE, linewidth=0), "outside the band")]
    legend_below(figure, *zip(*entries, strict=True))
    return figure

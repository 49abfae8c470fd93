"""Figures that compare posteriors, and that show chains and calibration.

Each function takes tensors, usually a mapping from the names of the posteriors to their
predictions. It returns a :class:`matplotlib.figure.Figure` that is not registered with pyplot: save
it with ``figure.savefig``. The same names in the same order get the same colors and markers in
every figure; the reference is dark gray. Figures are five inches wide, so that their text can be
read on a phone.
"""

from pyro_bdl.plots.chains import convergence, pairs, rank_histograms, ranks, trace
from pyro_bdl.plots.curves import cost_against_quality, temperature_curves
from pyro_bdl.plots.intervals import forest, intervals
from pyro_bdl.plots.maps import probability_maps, sd_ratio_maps
from pyro_bdl.plots.predictions import (
    calibration,
    function_space,
    pit_histogram,
    predictive_bands,
)
from pyro_bdl.plots.style import styles, use_style

__all__ = [
    "calibration",
    "convergence",
    "cost_against_quality",
    "forest",
    "function_space",
    "intervals",
    "pairs",
    "pit_histogram",
    "predictive_bands",
    "probability_maps",
    "rank_histograms",
    "ranks",
    "sd_ratio_maps",
    "styles",
    "temperature_curves",
    "trace",
    "use_style",
]

"""Figures that compare posteriors, and that show chains and calibration.

Each function takes tensors, usually a mapping from the names of the posteriors to their
predictions. It returns a :class:`matplotlib.figure.Figure` that is not registered with pyplot: save
it with ``figure.savefig``. The same names in the same order get the same colors and markers in
every figure; the reference is dark gray. Figures are five inches wide, so that their text can be
read on a phone.
"""

from pyro_bdl.plots.bands import predictive_bands
from pyro_bdl.plots.calibration import calibration, pit_counts, pit_histogram
from pyro_bdl.plots.chains import rank_counts, ranks, trace
from pyro_bdl.plots.convergence import convergence
from pyro_bdl.plots.cost import cost_against_quality
from pyro_bdl.plots.function_space import function_space
from pyro_bdl.plots.intervals import chosen_points, forest, intervals, point_name
from pyro_bdl.plots.maps import probability_maps, sd_ratio, sd_ratio_maps
from pyro_bdl.plots.pairs import pairs
from pyro_bdl.plots.simulations import rank_histograms
from pyro_bdl.plots.style import styles, use_style
from pyro_bdl.plots.temperature import temperature_curves

__all__ = [
    "calibration",
    "chosen_points",
    "convergence",
    "cost_against_quality",
    "forest",
    "function_space",
    "intervals",
    "pairs",
    "pit_counts",
    "pit_histogram",
    "point_name",
    "predictive_bands",
    "probability_maps",
    "rank_counts",
    "rank_histograms",
    "ranks",
    "sd_ratio",
    "sd_ratio_maps",
    "styles",
    "temperature_curves",
    "trace",
    "use_style",
]

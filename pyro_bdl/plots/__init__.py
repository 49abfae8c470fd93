"""Figures that compare posteriors, and that show chains and calibration.

Each function takes tensors, usually a mapping from the names of the posteriors to their
predictions. It returns a :class:`matplotlib.figure.Figure` that is not registered with pyplot: save
it with ``figure.savefig``. The same names in the same order get the same colors and markers in
every figure; the reference is dark gray. Figures are five inches wide, so that their text can be
read on a phone. ArviZ draws traces and pairs, of ``to_arviz(model, posterior, x, y)``.
"""

from pyro_bdl.plots.checks import pit_ecdf, ppc, residuals
from pyro_bdl.plots.curves import cost_against_quality, intervals, temperature_curves
from pyro_bdl.plots.histograms import rank_histograms, ranks
from pyro_bdl.plots.predictions import (
    calibration,
    function_space,
    predictive_bands,
    prior_predictive,
    probability_maps,
)
from pyro_bdl.plots.style import styles, use_style

__all__ = [
    "calibration",
    "cost_against_quality",
    "function_space",
    "intervals",
    "pit_ecdf",
    "ppc",
    "predictive_bands",
    "prior_predictive",
    "probability_maps",
    "rank_histograms",
    "ranks",
    "residuals",
    "styles",
    "temperature_curves",
    "use_style",
]

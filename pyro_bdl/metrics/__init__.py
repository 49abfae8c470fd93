"""Scores of predictions, calibration, uncertainty, and distances between posteriors.

``draws`` are draws of a prediction, shape (S, N, ...): S draws at N test points. ``probabilities``
are predictive class probabilities, the mean over the draws, shape (N, C). Every function computes
on the device of its tensors, in float64, and returns a scalar tensor unless it says otherwise.
"""

from pyro_bdl.metrics.calibration import (
    adaptive_calibration_error,
    coverage_range,
    expected_calibration_error,
    interval_coverage,
    mean_confidence,
    pit,
    reliability,
    uniformity,
)
from pyro_bdl.metrics.distances import mean_error, sd_error, wasserstein1, wasserstein2
from pyro_bdl.metrics.joint import energy_distance, median_distance, mmd
from pyro_bdl.metrics.monte_carlo import halves, monte_carlo_error, split_half
from pyro_bdl.metrics.predictive import agreement, categorical_kl, gaussian_kl, total_variation
from pyro_bdl.metrics.scores import (
    accuracy,
    brier,
    crps,
    effective_draws,
    expected_negative_log_likelihood,
    gaussian_nlpd,
    negative_log_predictive_density,
    rmse,
    squared_error,
)
from pyro_bdl.metrics.uncertainty import Uncertainty, auroc, entropy_parts, variance_parts

__all__ = [
    "Uncertainty",
    "accuracy",
    "adaptive_calibration_error",
    "agreement",
    "auroc",
    "brier",
    "categorical_kl",
    "coverage_range",
    "crps",
    "effective_draws",
    "energy_distance",
    "entropy_parts",
    "expected_calibration_error",
    "expected_negative_log_likelihood",
    "gaussian_kl",
    "gaussian_nlpd",
    "halves",
    "interval_coverage",
    "mean_confidence",
    "mean_error",
    "median_distance",
    "mmd",
    "monte_carlo_error",
    "negative_log_predictive_density",
    "pit",
    "reliability",
    "rmse",
    "sd_error",
    "split_half",
    "squared_error",
    "total_variation",
    "uniformity",
    "variance_parts",
    "wasserstein1",
    "wasserstein2",
]

"""Scores of predictions, calibration, uncertainty, and distances between posteriors.

``draws`` are draws of a prediction, shape (S, N, ...): S draws at N test points. ``probabilities``
are predictive class probabilities, the mean over the draws, shape (N, C). Every function computes
in float64 on the device of its tensors, or on the CPU where that device has no float64, and returns
a scalar tensor unless it says otherwise.
"""

from pyro_bdl.metrics.calibration import (
    adaptive_calibration_error,
    expected_calibration_error,
    interval_coverage,
    pit,
    reliability,
)
from pyro_bdl.metrics.distances import (
    agreement,
    categorical_kl,
    gaussian_kl,
    mean_error,
    sd_error,
    total_variation,
    wasserstein1,
    wasserstein2,
)
from pyro_bdl.metrics.joint import energy_distance, mmd
from pyro_bdl.metrics.scores import (
    accuracy,
    brier,
    crps,
    expected_negative_log_likelihood,
    gaussian_nlpd,
    negative_log_predictive_density,
    ranked_probability_score,
    rmse,
)
from pyro_bdl.metrics.uncertainty import (
    aupr,
    aurc,
    auroc,
    entropy_parts,
    fpr95,
    variance_parts,
)

__all__ = [
    "accuracy",
    "adaptive_calibration_error",
    "agreement",
    "aupr",
    "aurc",
    "auroc",
    "brier",
    "categorical_kl",
    "crps",
    "energy_distance",
    "entropy_parts",
    "expected_calibration_error",
    "expected_negative_log_likelihood",
    "fpr95",
    "gaussian_kl",
    "gaussian_nlpd",
    "interval_coverage",
    "mean_error",
    "mmd",
    "negative_log_predictive_density",
    "pit",
    "ranked_probability_score",
    "reliability",
    "rmse",
    "sd_error",
    "total_variation",
    "variance_parts",
    "wasserstein1",
    "wasserstein2",
]

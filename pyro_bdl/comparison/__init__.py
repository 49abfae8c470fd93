"""The comparison of posteriors: data, metrics and table of ``compare``."""

from pyro_bdl.comparison.costs import Costs
from pyro_bdl.comparison.evaluate import Evaluation, evaluate
from pyro_bdl.comparison.k_fold import KFold, k_fold
from pyro_bdl.comparison.predictive_draws import PredictiveDraws
from pyro_bdl.comparison.table import Comparison, compare_evaluations

__all__ = [
    "Comparison",
    "Costs",
    "Evaluation",
    "KFold",
    "PredictiveDraws",
    "compare_evaluations",
    "evaluate",
    "k_fold",
]

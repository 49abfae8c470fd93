"""The comparison of posteriors: data, metrics, table and figures of ``compare``."""

from pyro_bdl.comparison.captions import CAPTIONS
from pyro_bdl.comparison.costs import Costs
from pyro_bdl.comparison.evaluate import Evaluation, evaluate
from pyro_bdl.comparison.k_fold import KFold, k_fold
from pyro_bdl.comparison.predictive_draws import PredictiveDraws
from pyro_bdl.comparison.table import Comparison, compare_evaluations

__all__ = [
    "CAPTIONS",
    "Comparison",
    "Costs",
    "Evaluation",
    "KFold",
    "PredictiveDraws",
    "compare_evaluations",
    "evaluate",
    "k_fold",
]

"""The comparison of posteriors: data, metrics, table and figures of ``compare``."""

from pyro_bdl.comparison.captions import CAPTIONS
from pyro_bdl.comparison.costs import Costs
from pyro_bdl.comparison.held_out import PredictiveDraws
from pyro_bdl.comparison.k_fold import KFold, k_fold
from pyro_bdl.comparison.result import Comparison

__all__ = ["CAPTIONS", "Comparison", "Costs", "KFold", "PredictiveDraws", "k_fold"]

"""The parts of ``compare``: its data, its metrics, its table and its figures."""

from pyro_bdl.comparison.costs import Costs
from pyro_bdl.comparison.figures import CAPTIONS
from pyro_bdl.comparison.held_out import PredictiveDraws
from pyro_bdl.comparison.result import Comparison

__all__ = ["CAPTIONS", "Comparison", "Costs", "PredictiveDraws"]

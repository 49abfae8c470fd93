"""The parts of ``compare``: what is held against what, by which numbers, and the result."""

from pyro_bdl.comparison.figures import CAPTIONS
from pyro_bdl.comparison.held_out import PredictiveDraws
from pyro_bdl.comparison.result import Comparison

__all__ = ["CAPTIONS", "Comparison", "PredictiveDraws"]

"""The parts of ``compare``: what is held against what, by which numbers, and the result."""

from pyro_bdl.comparison.data import PredictiveDraws
from pyro_bdl.comparison.result import CAPTIONS, Comparison

__all__ = ["CAPTIONS", "Comparison", "PredictiveDraws"]

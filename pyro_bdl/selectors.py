"""The selectors of ``AutoSubnetwork``, which choose a subnetwork's weights (Daxberger et al.
2021)."""

from pyro_bdl.guides.selectors import (
    LargestMagnitude,
    LargestPredictiveVariance,
    LargestVariance,
    Random,
    Selector,
    Sites,
)

__all__ = [
    "LargestMagnitude",
    "LargestPredictiveVariance",
    "LargestVariance",
    "Random",
    "Selector",
    "Sites",
]

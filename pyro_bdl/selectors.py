"""The selectors of ``AutoSubnetwork``, which choose a subnetwork's weights (Daxberger et al.
2021)."""

from pyro_bdl.guides.selectors import (
    ByModule,
    BySite,
    LargestMagnitude,
    LargestPredictiveVariance,
    LargestVariance,
    LastLayer,
    Predicate,
    Random,
    Selector,
)

__all__ = [
    "ByModule",
    "BySite",
    "LargestMagnitude",
    "LargestPredictiveVariance",
    "LargestVariance",
    "LastLayer",
    "Predicate",
    "Random",
    "Selector",
]

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
    Size,
    Trained,
    diagonal_laplace,
    number_of,
)

ByName = BySite  # its earlier name

__all__ = [
    "ByModule",
    "ByName",
    "BySite",
    "LargestMagnitude",
    "LargestPredictiveVariance",
    "LargestVariance",
    "LastLayer",
    "Predicate",
    "Random",
    "Selector",
    "Size",
    "Trained",
    "diagonal_laplace",
    "number_of",
]

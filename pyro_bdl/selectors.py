"""The selectors of ``AutoSubnetwork``, which choose a subnetwork's weights (Daxberger et al.
2021)."""

from pyro_bdl.guides.selectors import (
    ByModule,
    ByName,
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

__all__ = [
    "ByModule",
    "ByName",
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

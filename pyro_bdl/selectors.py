"""Which weights a subnetwork holds (Daxberger et al. 2021): the selectors of ``AutoSubnetwork``."""

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

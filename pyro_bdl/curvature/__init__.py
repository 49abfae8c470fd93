"""Curvature of a program's log likelihood, and the Gaussian posterior that it gives with a
prior."""

from pyro_bdl.curvature.at import At
from pyro_bdl.curvature.config import CURVATURES, CurvatureConfig
from pyro_bdl.curvature.fit import Fitted, fit_curvature
from pyro_bdl.curvature.structures import (
    EKFAC,
    STRUCTURES,
    Diagonal,
    Full,
    Kernel,
    Kron,
    LowRank,
    Samples,
)
from pyro_bdl.program.subset import Subset, select

__all__ = [
    "CURVATURES",
    "EKFAC",
    "STRUCTURES",
    "At",
    "CurvatureConfig",
    "Diagonal",
    "Fitted",
    "Full",
    "Kernel",
    "Kron",
    "LowRank",
    "Samples",
    "Subset",
    "fit_curvature",
    "select",
]

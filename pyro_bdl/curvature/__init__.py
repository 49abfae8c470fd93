"""Curvature of a program's log likelihood, and the Gaussian posterior that it gives with a
prior."""

from pyro_bdl.curvature.config import CURVATURES, STRUCTURES, CurvatureConfig
from pyro_bdl.curvature.fit import Fitted, fit_curvature
from pyro_bdl.program.subset import Subset, select

__all__ = [
    "CURVATURES",
    "STRUCTURES",
    "CurvatureConfig",
    "Fitted",
    "Subset",
    "fit_curvature",
    "select",
]

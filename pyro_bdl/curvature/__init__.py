"""Curvature of a program's log likelihood, and the Gaussians that it makes with a prior."""

from pyro_bdl.curvature.fit import CURVATURES, STRUCTURES, Fitted, Recipe, fit_curvature
from pyro_bdl.curvature.subset import Subset, select

__all__ = ["CURVATURES", "STRUCTURES", "Fitted", "Recipe", "Subset", "fit_curvature", "select"]

"""Curvature structures by name; ``base.py`` defines their protocol."""

from collections.abc import Mapping
from types import MappingProxyType

from pyro_bdl.curvature.structures.base import Curvature
from pyro_bdl.curvature.structures.diagonal import DiagonalCurvature
from pyro_bdl.curvature.structures.full import FullCurvature
from pyro_bdl.curvature.structures.kernel import KernelCurvature
from pyro_bdl.curvature.structures.kron.curvature import EKFACCurvature, KroneckerCurvature
from pyro_bdl.curvature.structures.low_rank import LowRankCurvature
from pyro_bdl.curvature.structures.samples import SamplesCurvature

STRUCTURES: Mapping[str, type[Curvature]] = MappingProxyType(
    {
        "kron": KroneckerCurvature,
        "ekfac": EKFACCurvature,
        "full": FullCurvature,
        "diag": DiagonalCurvature,
        "low_rank": LowRankCurvature,
        "kernel": KernelCurvature,
        "samples": SamplesCurvature,
    }
)

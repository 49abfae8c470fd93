"""Posterior families, all of them ``pyro.infer.autoguide.AutoGuide``s."""

from typing import TYPE_CHECKING

from pyro_bdl.distributions.dropout_noise import BernoulliNoise, GaussianNoise
from pyro_bdl.guides.amortized import AutoAmortized
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.dropout.guide import AutoMCDropout
from pyro_bdl.guides.ensemble import AutoEnsemble
from pyro_bdl.guides.family import Family
from pyro_bdl.guides.gaussian import LaplaceGuide
from pyro_bdl.guides.laplace import AutoLaplaceGGN
from pyro_bdl.guides.last_layer import AutoLastLayer
from pyro_bdl.guides.low_rank import AutoLowRank
from pyro_bdl.guides.matrix_normal import AutoMatrixNormal
from pyro_bdl.guides.mean_field import AutoMeanField
from pyro_bdl.guides.mixture import MixtureGuide
from pyro_bdl.guides.point import AutoMAP
from pyro_bdl.guides.subnetwork import AutoSubnetwork
from pyro_bdl.guides.swag import AutoMultiSWAG, AutoSWAG
from pyro_bdl.guides.variational_last_layer import AutoVariationalLastLayer
from pyro_bdl.utils.names import attributes_elsewhere

if TYPE_CHECKING:
    from pyro_bdl.contrib.inducing.guide import AutoInducing
    from pyro_bdl.contrib.pathfinder import AutoPathfinder

__all__ = [
    "AutoAmortized",
    "AutoEnsemble",
    "AutoInducing",
    "AutoLaplaceGGN",
    "AutoLastLayer",
    "AutoLowRank",
    "AutoMAP",
    "AutoMCDropout",
    "AutoMatrixNormal",
    "AutoMeanField",
    "AutoMultiSWAG",
    "AutoPathfinder",
    "AutoSWAG",
    "AutoSubnetwork",
    "AutoVariationalLastLayer",
    "BernoulliNoise",
    "Family",
    "GaussianNoise",
    "Guide",
    "LaplaceGuide",
    "MixtureGuide",
]

__getattr__ = attributes_elsewhere(
    __name__, AutoInducing="pyro_bdl.contrib", AutoPathfinder="pyro_bdl.contrib"
)

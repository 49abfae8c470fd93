"""Posterior families, all of them ``pyro.infer.autoguide.AutoGuide``s."""

from pyro_bdl.guides.ensemble import AutoEnsemble
from pyro_bdl.guides.laplace import AutoLaplaceGGN, LaplaceGuide
from pyro_bdl.guides.mean_field import AutoMeanField
from pyro_bdl.guides.point import AutoMAP
from pyro_bdl.guides.subnetwork import AutoSubnetwork, SubsetNormal

__all__ = [
    "AutoEnsemble",
    "AutoLaplaceGGN",
    "AutoMAP",
    "AutoMeanField",
    "AutoSubnetwork",
    "LaplaceGuide",
    "SubsetNormal",
]

"""Tempered and compiled evidence lower bounds."""

from pyro_bdl.elbo.compiled import CompiledELBO
from pyro_bdl.elbo.mean_field_limit import MeanFieldLimit
from pyro_bdl.elbo.step import Step, Terms
from pyro_bdl.elbo.tempered import TemperedTrace_ELBO, TemperedTraceMeanField_ELBO

__all__ = [
    "CompiledELBO",
    "MeanFieldLimit",
    "Step",
    "TemperedTraceMeanField_ELBO",
    "TemperedTrace_ELBO",
    "Terms",
]

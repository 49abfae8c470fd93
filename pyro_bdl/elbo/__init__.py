"""Tempered and compiled evidence lower bounds."""

from pyro_bdl.elbo.compiled import CompiledELBO
from pyro_bdl.elbo.tempered import TemperedTrace_ELBO, TemperedTraceMeanField_ELBO

__all__ = ["CompiledELBO", "TemperedTraceMeanField_ELBO", "TemperedTrace_ELBO"]

"""Distributions taken apart and copied, and those that Pyro lacks."""

from pyro_bdl.distributions.log_uniform import LogUniform
from pyro_bdl.distributions.matrix_normal import MatrixNormal

__all__ = ["LogUniform", "MatrixNormal"]

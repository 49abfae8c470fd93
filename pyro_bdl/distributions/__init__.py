"""Distributions that Pyro lacks; helpers that split distributions into tensors and copy them."""

from pyro_bdl.distributions.log_uniform import ImproperLogUniform
from pyro_bdl.distributions.matrix_normal import MatrixNormal

LogUniform = ImproperLogUniform  # its earlier name

__all__ = ["ImproperLogUniform", "LogUniform", "MatrixNormal"]

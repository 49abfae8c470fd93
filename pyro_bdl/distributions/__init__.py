"""Distributions that Pyro lacks; helpers that split distributions into tensors and copy them."""

from pyro_bdl.distributions.log_uniform import LogUniform
from pyro_bdl.distributions.matrix_normal import MatrixNormal

__all__ = ["LogUniform", "MatrixNormal"]

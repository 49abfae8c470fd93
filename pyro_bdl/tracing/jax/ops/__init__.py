"""ATen operators in JAX: a file for each kind, which enters its functions in the table."""

# ruff: noqa: F401
from pyro_bdl.tracing.jax.ops import arithmetic, complex, nn, pooling, random, shapes

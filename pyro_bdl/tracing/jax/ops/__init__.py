"""ATen operators in JAX: a file for each kind, which enters its functions in the table."""

from pyro_bdl.tracing.jax.ops import arithmetic, complex, nn, pooling, random, shapes

__all__ = ["arithmetic", "complex", "nn", "pooling", "random", "shapes"]

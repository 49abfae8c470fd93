"""What older releases of the dependencies lack, in one place."""

import contextlib

import jax


def enable_x64(double: bool) -> contextlib.AbstractContextManager:
    """Compute in float64, or in float32, within the context: ``jax.enable_x64`` since JAX 0.8."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(double)
    from jax.experimental import enable_x64 as of_older_releases

    return of_older_releases(double)

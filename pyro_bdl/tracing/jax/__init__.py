"""Torch functions evaluated in JAX."""

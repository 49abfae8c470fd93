"""Bayesian deep learning as a plugin on Pyro."""

from pyro_bdl._version import __version__

__all__ = ["__version__"]

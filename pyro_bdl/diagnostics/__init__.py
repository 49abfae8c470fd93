"""Convergence diagnostics of Markov chains on torch tensors, on the device the draws are on."""

from pyro_bdl.diagnostics.ess import ess
from pyro_bdl.diagnostics.mcse import mcse
from pyro_bdl.diagnostics.rhat import rhat

__all__ = ["ess", "mcse", "rhat"]

"""Markov chain Monte Carlo on a Pyro program."""

from pyro_bdl.samples import Samples
from pyro_bdl.mcmc.sampling import sample

__all__ = ["Samples", "sample"]

"""Markov chain Monte Carlo on a Pyro program."""

from pyro_bdl.mcmc.sampling import sample
from pyro_bdl.samples import Samples

__all__ = ["Samples", "sample"]

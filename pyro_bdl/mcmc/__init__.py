"""Markov chain Monte Carlo on a Pyro program."""

from pyro_bdl.mcmc.sampling import sample
from pyro_bdl.mcmc.schedules import Cyclical, Polynomial
from pyro_bdl.mcmc.step_size import suggest_step_size
from pyro_bdl.mcmc.stochastic import sgmcmc
from pyro_bdl.samples import Samples

__all__ = ["Cyclical", "Polynomial", "Samples", "sample", "sgmcmc", "suggest_step_size"]

"""Markov chain Monte Carlo on a Pyro program."""

from pyro_bdl.guides.subnetwork import AutoSubnetwork
from pyro_bdl.mcmc.ensemble import ensemble_sample
from pyro_bdl.mcmc.kernels import HMC, MAMS, MCLMC, NUTS
from pyro_bdl.mcmc.sampling import sample
from pyro_bdl.mcmc.stochastic_gradient.samplers.hamiltonian import SGHMC
from pyro_bdl.mcmc.stochastic_gradient.samplers.langevin import SGLD
from pyro_bdl.mcmc.stochastic_gradient.samplers.microcanonical import SMILE
from pyro_bdl.mcmc.stochastic_gradient.samplers.preconditioned import PSGLD
from pyro_bdl.mcmc.stochastic_gradient.samplers.thermostat import SGNHT
from pyro_bdl.mcmc.stochastic_gradient.sampling import sgmcmc, suggest_step_size
from pyro_bdl.mcmc.stochastic_gradient.schedules import Cyclical, Polynomial
from pyro_bdl.program.samples import Samples

AutoSubnetwork.chains = staticmethod(sample)

__all__ = [
    "HMC",
    "MAMS",
    "MCLMC",
    "NUTS",
    "PSGLD",
    "SGHMC",
    "SGLD",
    "SGNHT",
    "SMILE",
    "Cyclical",
    "Polynomial",
    "Samples",
    "ensemble_sample",
    "sample",
    "sgmcmc",
    "suggest_step_size",
]

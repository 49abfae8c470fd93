"""Markov chain Monte Carlo on a Pyro program."""

from typing import TYPE_CHECKING

from pyro_bdl.mcmc.ensemble import ensemble_sample
from pyro_bdl.mcmc.kernels import HMC, MAMS, MCLMC, NUTS
from pyro_bdl.mcmc.sampling import sample
from pyro_bdl.mcmc.stochastic_gradient.kernels import Cyclical, Polynomial
from pyro_bdl.mcmc.stochastic_gradient.langevin import SGHMC, SGLD
from pyro_bdl.mcmc.stochastic_gradient.sampling import sgmcmc, suggest_step_size
from pyro_bdl.program.samples import Samples
from pyro_bdl.utils.names import attributes_elsewhere

if TYPE_CHECKING:
    from pyro_bdl.contrib.stochastic_gradient import PSGLD, SGNHT, SMILE
    from pyro_bdl.mcmc.tempered import tempered_smc

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
    "tempered_smc",
]

__getattr__ = attributes_elsewhere(
    __name__, PSGLD="pyro_bdl.contrib", SGNHT="pyro_bdl.contrib", SMILE="pyro_bdl.contrib",
    tempered_smc="pyro_bdl.mcmc.tempered",
)  # fmt: skip

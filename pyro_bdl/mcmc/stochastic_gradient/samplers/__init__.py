"""Kernels of stochastic-gradient MCMC on chains (chains, P), one file each.

``init(position)`` gives a state, and ``update(state, gradient, step_size, temperature)`` moves
every chain by one step, where ``gradient`` (chains, P) is that of the log density at
``state.position`` and the noise is torch's. With temperature T the stationary density is p^(1/T);
at T = 0 there is no noise.
"""

from pyro_bdl.mcmc.stochastic_gradient.kernels import StochasticKernel
from pyro_bdl.mcmc.stochastic_gradient.samplers.hamiltonian import SGHMC
from pyro_bdl.mcmc.stochastic_gradient.samplers.langevin import SGLD
from pyro_bdl.mcmc.stochastic_gradient.samplers.microcanonical import SMILE
from pyro_bdl.mcmc.stochastic_gradient.samplers.preconditioned import PSGLD
from pyro_bdl.mcmc.stochastic_gradient.samplers.thermostat import SGNHT

KERNELS: dict[str, type[StochasticKernel]] = {
    kind.name: kind for kind in (SGLD, PSGLD, SGHMC, SGNHT, SMILE)
}

"""Kernels of stochastic-gradient MCMC on chains (chains, P), one file each.

``init(position)`` gives a state, and ``update(state, gradient, step_size, temperature)`` moves
every chain by one step, where ``gradient`` (chains, P) is that of the log density at
``state.position`` and the noise is torch's. With temperature T the stationary density is p^(1/T);
at T = 0 there is no noise.
"""

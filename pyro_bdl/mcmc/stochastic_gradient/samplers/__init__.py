"""Update rules of stochastic-gradient MCMC: free functions on chains (chains, P), one file each.

Each file has ``init(position, ...) -> state`` and ``update(state, gradient, step_size, ...) ->
state``, where ``gradient`` is that of the log density at ``state.position`` and the noise is
torch's. With ``temperature`` T the stationary density is p^(1/T); at T = 0 there is no noise.
"""

"""Energy diagnostics of Hamiltonian Monte Carlo."""

from torch import Tensor

from pyro_bdl.diagnostics.blocks import map_blocks


def bfmi(energy: Tensor) -> Tensor:
    """Estimated Bayesian fraction of missing information of each chain; below 0.3 is poor.

    ::

        BFMI = mean_t (E_t - E_t-1)^2 / var(E)

    A low value means that resampling the momenta changes the energy too little in each iteration,
    so that the tails are explored slowly.

    :param energy: ``(chains, draws, ...)``, the Hamiltonian in nats, as in
        ``Samples.stats["energy"]``.
    :returns: float64 ``(chains, ...)``.
    :raises TypeError: if ``energy`` is not a real tensor.
    :raises ValueError: if it has fewer than two axes or fewer than 4 draws per chain.

    Source: Betancourt (2016), Diagnosing suboptimal cotangent disintegrations in Hamiltonian Monte
    Carlo, equation 9. Equal to ``arviz.bfmi``.
    """
    return map_blocks(_of_each_chain, energy, progress=False)


def _of_each_chain(x: Tensor) -> Tensor:
    return (x.diff(dim=-1).square().mean(-1) / x.var(-1)).T

"""R-hat and effective sample sizes from one sort of the draws, and the energy of chains."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_bdl.diagnostics.blocks import check_draws, map_blocks, split_chains
from pyro_bdl.diagnostics.ess import ess_below, ess_of_chains
from pyro_bdl.diagnostics.rank import normal_scores, ordered, quantile_of_sorted, sort
from pyro_bdl.diagnostics.rhat import rhat_of_halves
from pyro_bdl.utils.precision import double


class Convergence(NamedTuple):
    """The result of ``convergence``, each float64 ``(...)``.

    :param rhat: rank-normalized split R-hat; NaN for a single chain or a constant.
    :param ess_bulk: effective sample size of the bulk, in draws.
    :param ess_tail: the smaller effective sample size of the 5 % and the 95 % quantile, in draws.
    """

    rhat: Tensor
    ess_bulk: Tensor
    ess_tail: Tensor


def convergence(draws: Tensor) -> Convergence:
    """``rhat``, ``ess`` and ``ess(kind="tail")`` of each quantity from one sort, in half the time.

    :param draws: ``(chains, draws, ...)``, any real dtype and device.
    :raises TypeError: if ``draws`` is not a real tensor.
    :raises ValueError: for fewer than two axes or 4 draws a chain.

    Source: Vehtari et al. (2021), Rank-normalization, folding, and localization.
    """

    def statistic(x: Tensor) -> Tensor:
        halves = split_chains(x)
        pooled = ordered(halves.flatten(1))
        scores = normal_scores(pooled).view_as(halves)
        # Half chains lack the middle draw of an odd number of draws.
        in_order = pooled.values if x.shape[-1] % 2 == 0 else sort(x.flatten(1))
        limits = [quantile_of_sorted(in_order, level) for level in (0.05, 0.95)]
        rhat = rhat_of_halves(scores, pooled)
        if x.shape[1] == 1:
            rhat = torch.full_like(rhat, torch.nan)
        found = torch.stack([rhat, ess_of_chains(scores), ess_below(x, limits)])
        return torch.where(in_order[:, -1].isnan(), torch.nan, found)

    return Convergence(*map_blocks(statistic, draws))


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
    return map_blocks(lambda x: (x.diff(dim=-1).square().mean(-1) / x.var(-1)).T, energy)


def separate_modes(draws: Tensor) -> int:
    """The number of modes that chains have stayed in: groups of chains that have met no other.

    Two chains have met if the central 90 % of their draws overlap in every number; whoever meets
    the same chain is in one group. Each of K chains of a network that has settled in another
    permutation of its hidden units counts, though all have the same function.

    :param draws: ``(chains, draws, ...)``.
    :returns: 1 for chains that all overlap.
    """
    check_draws(draws)
    numbers = double(draws.flatten(2)).cpu().numpy()
    low, high = np.quantile(numbers, (0.05, 0.95), axis=1)
    met = ((low[:, None] <= high) & (low <= high[:, None])).all(-1)
    return len(np.unique(np.linalg.matrix_power(met, len(met)), axis=0))

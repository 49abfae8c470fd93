"""Rank-normalized split R-hat."""

import math

import torch
from scipy.special import fdtri
from torch import Tensor

from pyro_bdl.diagnostics.blocks import check_draws, map_blocks, split_chains
from pyro_bdl.diagnostics.rank import Ordered, folded, normal_scores, ordered
from pyro_bdl.utils.precision import double_device
from pyro_bdl.utils.validation import whole_number

# R-hat that counts as disagreement, and how often either of its two parts may exceed the limit.
_DISAGREE, _BY_CHANCE = 1.01, 1e-3
# The share of many quantities whose R-hat must lie within the limit.
SHARE = 0.95


def limit_of_rhat(chains: int, draws: int) -> float:
    """The R-hat above which chains disagree: 1.01, or more for chains too short to tell.

    Of K independent half chains of n Normal draws, B / W has the F distribution of K - 1 and
    K (n - 1) degrees of freedom. With f its 99.9 % quantile::

        limit = max(1.01, sqrt((n - 1 + f) / n)),    K = 2 chains,    n = draws / 2

    Of four chains it is 1.01 from 250 draws a chain on, and 1.11 at 25. R-hat is the larger of two
    such numbers, so that independent draws exceed its limit twice in a thousand times.

    :param chains: the number of chains.
    :param draws: of each chain.
    :returns: infinity for fewer than 4 draws, of which no R-hat is known.
    """
    k, n = 2 * chains, draws // 2
    if n < 2:
        return math.inf
    by_chance = float(fdtri(k - 1, k * (n - 1), 1 - _BY_CHANCE))
    return max(_DISAGREE, math.sqrt((n - 1 + by_chance) / n))


def rhat(draws: Tensor, *, superchains: int | None = None) -> Tensor:
    """Rank-normalized split R-hat of each quantity: 1 if the chains agree; see ``limit_of_rhat``.

    For chains of n draws with within-chain variance W, and variance B / n of the chain means::

        Rhat = sqrt((B / W + n - 1) / n)

    The result is the larger of two values: for the rank-normalized split chains (location), and for
    their rank-normalized distances from the median (scale).

    Of many short chains, of which M each, a superchain, began at one point, the chains of a
    superchain are taken for one long one (nested R-hat). With B between the means of superchains
    and W_k within superchain k, the variance of its chains' means and their mean variance::

        Rhat = sqrt(1 + B / mean_k W_k)

    Example::

        >>> round(bdl.diagnostics.rhat(torch.randn(4, 500)).item(), 1)  # four chains that agree
        1.0
        >>> trend = torch.linspace(-1, 1, 500).repeat(4, 1)
        >>> round(bdl.diagnostics.rhat(trend).item(), 1)
        1.7

    :param draws: ``(chains, draws, ...)``, any real dtype and device.
    :param superchains: how many there are, of equally many chains that follow each other.
    :returns: float64 ``(...)``; NaN for a quantity that is constant or holds a NaN, and for a
        single chain.
    :raises TypeError: if ``draws`` is not a real tensor.
    :raises ValueError: if ``draws`` has fewer than two axes or 4 draws a chain, or for
        ``superchains`` that do not divide the chains.

    Source: Vehtari, Gelman, Simpson, Carpenter, Bürkner (2021), Rank-normalization, folding, and
    localization: an improved R-hat, sections 3 and 4; Margossian et al. (2024), Nested R-hat, eq.
    7. Equal to ``arviz.rhat`` of 0.23 and 1.x, and ``rhat_nested`` of 1.x.
    """
    check_draws(draws)
    if superchains is not None:
        if draws.shape[0] % whole_number(superchains, "superchains", least=2):
            raise ValueError(f"superchains={superchains} must divide the {draws.shape[0]} chains")
        return map_blocks(lambda x: _rank_rhat(x, superchains), draws)
    if draws.shape[0] == 1:
        device = double_device(draws.device)
        return torch.full(draws.shape[2:], torch.nan, dtype=torch.float64, device=device)
    return map_blocks(_rank_rhat, draws)


def within_rhat(draws: Tensor) -> Tensor:
    """R-hat of each chain on its own: whether its two halves agree.

    For chains that stay in separate modes, such as those of ``mcmc.ensemble_sample``: their R-hat
    together is large however well each explores its mode.

    :param draws: ``(chains, draws, ...)``.
    :returns: float64 ``(chains, ...)``.
    """
    check_draws(draws)
    chains = [map_blocks(_rank_rhat, chain[None]) for chain in draws]
    return torch.stack(chains)


def _rank_rhat(x: Tensor, superchains: int | None = None) -> Tensor:
    halves = split_chains(x)
    pooled = ordered(halves.flatten(1))
    return rhat_of_halves(normal_scores(pooled).view_as(halves), pooled, superchains)


def rhat_of_halves(scores: Tensor, pooled: Ordered, superchains: int | None = None) -> Tensor:
    """R-hat from the normal scores of the half chains, and from their distances to the median.

    :param scores: ``(block, chains, n)``.
    :param pooled: the same draws, chain after chain, as sorted rows ``(block, chains * n)``.
    """

    def ratio(x: Tensor) -> Tensor:
        return split_rhat(x) if superchains is None else _nested(x, superchains)

    location, distances = ratio(scores), folded(pooled)
    scale = ratio(normal_scores(distances).view_as(scores))
    scale = torch.where(distances.values[:, -1].isnan(), torch.nan, scale)
    # If half of the draws have one value and half another, all distances are equal: not NaN.
    larger = torch.where(scale > location, scale, location)
    return torch.where(pooled.values[:, -1].isnan(), torch.nan, larger)


def split_rhat(x: Tensor) -> Tensor:
    """sqrt((B / W + n - 1) / n) of chains ``(block, chains, n)``, without splitting them."""
    n = x.shape[-1]
    mean = x.mean(-1, keepdim=True)
    within = (x - mean).square().sum(-1).mean(-1) / (n - 1)
    between = n * mean.squeeze(-1).var(-1)
    return ((between / within + n - 1) / n).sqrt()


def _nested(x: Tensor, superchains: int) -> Tensor:
    """sqrt(1 + B / W) of chains ``(block, chains, n)``, those of a superchain one after another."""
    means, variances = x.mean(-1), x.var(-1)
    by_superchain = means.unflatten(-1, (superchains, -1))
    within = by_superchain.var(-1) + variances.unflatten(-1, (superchains, -1)).mean(-1)
    return (1 + by_superchain.mean(-1).var(-1) / within.mean(-1)).sqrt()

"""Monte Carlo error of a distance: its standard error, and halves of draws to compare."""

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_bdl.utils.jackknife import jackknife_error, number_of_groups, without_each


def monte_carlo_error(
    distance: Callable[..., Tensor],
    a: Tensor,
    b: Tensor,
    *,
    groups: int = 10,
    at_once: bool = False,
) -> tuple[Tensor, Tensor]:
    """Monte Carlo standard error of a distance, and what few draws add to it, by a grouped
    jackknife.

    Both sets of draws are cut into G groups of neighbors, and the distance d_g is computed without
    the g-th group of either::

        se^2 = (G - 1) / G  sum_g (d_g - mean d)^2
        added = d - sqrt(max(0, d^2 - (G - 1) (mean d_g^2 - d^2)))

    Groups of neighbors keep the error of autocorrelated draws from being underestimated, if the
    groups are longer than the autocorrelation. Each d_g uses nearly all draws because distances are
    nonlinear near zero, so that single groups would give another error. Between equal
    distributions, for which distances are not Normal, the error is about 1.5 times too large, and
    nearly all of the distance is what few draws add: its square falls as their number grows.

    :param distance: a function of draws (S1, N, ...) and (S2, N, ...); it returns a scalar, or a
        vector of several distances.
    :param a: ``(S1, ...)``.
    :param b: ``(S2, ...)``.
    :param groups: G; reduced if a group would have fewer than 4 draws.
    :param at_once: whether the distance takes G as its third argument, and returns all d_g (G, ...)
        then, as ``energy_distance`` does, which is unbiased: nothing is added to it.
    :returns: the standard errors and what few draws add, with the shape of the distance; NaN for
        fewer than 20 draws.

    Source: Kuensch (1989), The jackknife and the bootstrap for general stationary observations,
    section 2, with blocks that do not overlap; Quenouille (1956), Notes on bias in estimation.
    """
    groups, found = number_of_groups(len(a), len(b), most=groups), distance(a, b)
    if not groups:
        unknown = torch.full_like(found, torch.nan)
        return unknown, unknown
    if at_once:
        return jackknife_error(distance(a, b, groups)), torch.zeros_like(found)
    pairs = zip(without_each(a, groups), without_each(b, groups), strict=True)
    without = torch.stack([distance(p, q) for p, q in pairs])
    square = found.square()
    noise = (groups - 1) * (without.square().mean(0) - square)
    return jackknife_error(without), found - (square - noise).clamp_min(0.0).sqrt()


def halves(draws: Tensor, *, chains: int = 1) -> tuple[Tensor, Tensor]:
    """Two halves of draws: half of the chains and the others, or both ends of a single chain.

    :param draws: ``(S, N, ...)``, chain after chain.
    :param chains: how many chains of equal length the draws are.
    :raises ValueError: for fewer than 2 draws, or where S is not a multiple of ``chains``.
    """
    size = draws.shape[0]
    if size < 2:
        raise ValueError("two halves need at least 2 draws, but draws has 1: draw more")
    if chains < 1 or size % chains:
        raise ValueError(f"chains={chains} does not divide the {size} draws")
    middle = size // 2 if chains == 1 else chains // 2 * (size // chains)
    return draws[:middle], draws[middle:]

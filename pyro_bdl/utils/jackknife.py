"""Standard errors over draws by the grouped jackknife, of distances too, and errors that are
themselves estimated."""

import math
from collections.abc import Callable, Iterator

import torch
from scipy.special import ndtr, ndtri, stdtrit
from torch import Tensor

GROUPS = 10
ERRORS = 2.0  # standard errors that count as a difference
_LEAST_DRAWS, _LEAST_GROUPS = 4, 5


def number_of_groups(*counts: float, most: int = GROUPS) -> int:
    """The number of groups of sets of (effective) draws, with at least 4 draws in each; 0 if there
    would be fewer than 5 groups, or a count is NaN."""
    if any(map(math.isnan, counts)):
        return 0
    groups = int(min(most, *(count / _LEAST_DRAWS for count in counts)))
    return groups if groups >= _LEAST_GROUPS else 0


def without_each(draws: Tensor, groups: int) -> Iterator[Tensor]:
    """Yield the draws without the first group of neighbors, without the second, and so on."""
    parts = draws.tensor_split(groups)
    for g in range(groups):
        yield torch.cat([*parts[:g], *parts[g + 1 :]])


def jackknife_error(values: Tensor) -> Tensor:
    """sqrt((G - 1) / G sum_g (v_g - mean v)^2) of the values ``(G, ...)`` without each group."""
    return values.std(0, correction=0) * math.sqrt(len(values) - 1)


def enlarged(errors: float, *parts: tuple[float, float]) -> float:
    """The factor of a standard error that is itself estimated, so that a deviation beyond
    ``errors`` of it is as rare as for a Normal.

    It is t / z, with t the quantile of Student's distribution where z is the Normal's. The degrees
    of freedom of sqrt(sum_i e_i^2) are (sum e^2)^2 / sum (e_i^4 / nu_i) (Welch 1947).

    :param errors: z.
    :param parts: the independent parts of the error, e_i and its degrees of freedom nu_i, infinity
        of one that is enlarged already.
    """
    spread = sum(e**4 / max(1.0, nu) for e, nu in parts)
    if not spread > 0:  # no error, or an unknown one
        return 1.0
    degrees = sum(e**2 for e, _ in parts) ** 2 / spread
    return float(stdtrit(degrees, ndtr(errors))) / errors


def of_many(count: int) -> float:
    """The number of errors beyond which of some deviations one or more are as rarely as a single
    one is beyond two (Bonferroni)."""
    return ERRORS * float(ndtri(1 - 0.025 / count) / ndtri(0.975))


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

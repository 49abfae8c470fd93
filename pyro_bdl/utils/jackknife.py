"""Standard errors over draws by the grouped jackknife, and errors that are themselves estimated."""

import math
from collections.abc import Iterator

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
    :param parts: the independent parts of the error, e_i and its degrees of freedom nu_i.
    """
    total = sum(e**2 for e, _ in parts)
    if not total > 0:  # none, or unknown
        return 1.0
    degrees = total**2 / sum(e**4 / max(1.0, nu) for e, nu in parts)
    return float(stdtrit(degrees, ndtr(errors))) / errors


def of_many(count: int) -> float:
    """The number of errors beyond which of some deviations one or more are as rarely as a single
    one is beyond two (Bonferroni)."""
    return ERRORS * float(ndtri(1 - 0.025 / count) / ndtri(0.975))

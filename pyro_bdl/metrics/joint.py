"""Joint distances between two posteriors' functions: a draw at all test points is one vector.

Unlike the marginal distances they depend on the dependence between values at different inputs. The
norm is the root mean square over the test points, |f| = sqrt(1/N sum_n f_n^2), in the units of f.
Both distances use all pairs of draws: a few hundred to a thousand draws of each are enough.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_bdl.metrics.blocks import same_functions


def energy_distance(a: Tensor, b: Tensor) -> Tensor:
    """Energy distance of two distributions of functions, unbiased.

    ::

        2 E|X - Y| - E|X - X'| - E|Y - Y'|

    over different draws X, X' of a and Y, Y' of b. It is zero for equal distributions; the estimate
    can be negative by chance.

    :param a: ``(S1, N, ...)``, draws of a function at the test points.
    :param b: ``(S2, N, ...)``, draws of the reference.
    :returns: a scalar, in the units of the draws.
    :raises ValueError: if the test points differ in shape.

    Source: Szekely & Rizzo (2013), Energy statistics, eq. 1.
    """
    within_a, across, within_b = _pairs(a, b)
    same = torch.zeros((), dtype=torch.float64, device=a.device)
    return _contrast(lambda d: -d, same, within_a, across, within_b)


def mmd(a: Tensor, b: Tensor, *, length_scale: float | Tensor | None = None) -> Tensor:
    """Squared maximum mean discrepancy of two distributions of functions, unbiased.

    ::

        E k(X, X') + E k(Y, Y') - 2 E k(X, Y),    k(x, y) = exp(-|x - y|^2 / (2 l^2))

    over different draws X, X' of a and Y, Y' of b. It lies between 0, for equal distributions, and
    2; the estimate can be negative by chance.

    :param a: ``(S1, N, ...)``, draws of a function at the test points.
    :param b: ``(S2, N, ...)``, draws of the reference.
    :param length_scale: l, in the units of the draws; by default ``median_distance(b)``, so that
        several posteriors are compared with the reference by the same kernel.
    :returns: a scalar without units.
    :raises ValueError: if the test points differ in shape, or if the length scale is not positive,
        as by default for a reference without spread.

    Source: Gretton et al. (2012), A kernel two-sample test, lemma 6.
    """
    scale = torch.as_tensor(
        median_distance(b) if length_scale is None else length_scale, device=a.device
    )
    if not scale > 0:
        raise ValueError(f"length_scale must be positive, got {float(scale):g}")
    within_a, across, within_b = _pairs(a, b)
    scale = scale.to(across)
    one = torch.ones((), dtype=torch.float64, device=a.device)
    return _contrast(lambda d: (-(d / scale).square() / 2).exp(), one, within_a, across, within_b)


def median_distance(draws: Tensor) -> Tensor:
    """Median of |X - X'| over the pairs of different draws, in their units; 0 for a single draw."""
    vectors = _vectors(draws, draws[0])
    if len(vectors) < 2:
        return vectors.new_zeros(())
    return torch.pdist(vectors).median()


def _contrast(
    similarity: Callable[[Tensor], Tensor],
    of_equals: Tensor,
    within_a: Tensor,
    across: Tensor,
    within_b: Tensor,
) -> Tensor:
    """E s(X, X') + E s(Y, Y') - 2 E s(X, Y) for a function s of distances.

    :param of_equals: s(0).
    """
    within = [
        similarity(distances).mean() if len(distances) else of_equals
        for distances in (within_a, within_b)
    ]
    return within[0] + within[1] - 2 * similarity(across).mean()


def _pairs(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distances of pairs within a, between a and b, and within b; a single draw has no pairs."""
    same_functions(a, b)
    x, y = _vectors(a, b[0]), _vectors(b, b[0])
    return torch.pdist(x), torch.cdist(x, y), torch.pdist(y)


def _vectors(draws: Tensor, origin: Tensor) -> Tensor:
    """Draws as vectors ``(S, N)`` in float64, scaled so that their Euclidean norm is the root mean
    square."""
    flat = (draws.detach() - origin.detach()).double().reshape(len(draws), -1)
    return flat / flat.shape[1] ** 0.5

"""Joint distances between two posteriors' functions: a draw at all test points is one vector.

Unlike the marginal distances they depend on the dependence between values at different inputs. The
norm is the root mean square over the test points, |f| = sqrt(1/N sum_n f_n^2), in the units of f.
Both distances use all pairs of draws: a few hundred to a thousand draws of each are enough.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_bdl.metrics.blocks import same_functions
from pyro_bdl.utils.precision import double


def energy_distance(a: Tensor, b: Tensor, groups: int | None = None) -> Tensor:
    """Energy distance of two distributions of functions, unbiased.

    ::

        2 E|X - Y| - E|X - X'| - E|Y - Y'|

    over different draws X, X' of a and Y, Y' of b. It is zero for equal distributions; the estimate
    can be negative by chance.

    :param a: ``(S1, N, ...)``, draws of a function at the test points.
    :param b: ``(S2, N, ...)``, draws of the reference.
    :param groups: G, for the G distances without each of G groups of neighbors of either.
    :returns: a scalar, or (G,), in the units of the draws.
    :raises ValueError: if the test points differ in shape.

    Source: Szekely & Rizzo (2013), Energy statistics, eq. 1.
    """
    return _contrast(lambda d: -d, a, b, groups)


def mmd(
    a: Tensor,
    b: Tensor,
    groups: int | None = None,
    *,
    length_scale: float | Tensor | None = None,
) -> Tensor:
    """Squared maximum mean discrepancy of two distributions of functions, unbiased.

    ::

        E k(X, X') + E k(Y, Y') - 2 E k(X, Y),    k(x, y) = exp(-|x - y|^2 / (2 l^2))

    over different draws X, X' of a and Y, Y' of b. It lies between 0, for equal distributions, and
    2; the estimate can be negative by chance.

    :param a: ``(S1, N, ...)``, draws of a function at the test points.
    :param b: ``(S2, N, ...)``, draws of the reference.
    :param groups: as of ``energy_distance``.
    :param length_scale: l, in the units of the draws; by default ``median_distance(b)``, so that
        several posteriors are compared with the reference by the same kernel.
    :returns: a scalar, or (G,), without units.
    :raises ValueError: if the test points differ in shape, or if the length scale is not positive,
        as by default for a reference without spread.

    Source: Gretton et al. (2012), A kernel two-sample test, lemma 6.
    """
    scale = float(median_distance(b) if length_scale is None else length_scale)
    if not scale > 0:
        raise ValueError(f"length_scale must be positive, got {scale:g}")
    return _contrast(lambda d: (-(d / scale).square() / 2).exp(), a, b, groups)


def median_distance(draws: Tensor) -> Tensor:
    """Median of |X - X'| over the pairs of different draws, in their units; 0 for a single draw."""
    vectors = _vectors(draws, draws[0])
    if len(vectors) < 2:
        return vectors.new_zeros(())
    return torch.pdist(vectors).median()


def _contrast(
    similarity: Callable[[Tensor], Tensor], a: Tensor, b: Tensor, groups: int | None
) -> Tensor:
    """E s(X, X') + E s(Y, Y') - 2 E s(X, Y) for a function s of distances."""
    same_functions(a, b)
    x, y = _vectors(a, b[0]), _vectors(b, b[0])
    groups = groups or 0
    of_x, of_y = _groups(x, groups), _groups(y, groups)
    across = similarity(torch.cdist(x, y)).flatten()
    pairs = of_x.repeat_interleave(len(y)), of_y.repeat(len(x))
    total = -2 * _means(across, *pairs, groups)
    for vectors, of in ((x, of_x), (y, of_y)):
        distances = torch.pdist(vectors) if len(vectors) > 1 else vectors.new_zeros(1)
        first, second = torch.triu_indices(len(vectors), len(vectors), 1, device=vectors.device)
        pairs = (of[first], of[second]) if len(vectors) > 1 else (of, of)
        total = total + _means(similarity(distances), *pairs, groups)
    return total


def _groups(draws: Tensor, groups: int) -> Tensor:
    """The group of neighbors of each draw."""
    parts = torch.arange(len(draws), device=draws.device).tensor_split(max(1, groups))
    return torch.cat([torch.full_like(part, number) for number, part in enumerate(parts)])


def _means(values: Tensor, first: Tensor, second: Tensor, groups: int) -> Tensor:
    """The mean of values of pairs; with groups of draws the means (G,) without each group.

    :param first: the group of a pair's first draw; ``second`` that of its second.
    """
    if not groups:
        return values.mean()

    def left(weights: Tensor) -> Tensor:
        sums = torch.bincount(first * groups + second, weights, groups**2).view(groups, groups)
        return sums.sum() - sums.sum(0) - sums.sum(1) + sums.diagonal()

    return left(values) / left(torch.ones_like(values))


def _vectors(draws: Tensor, origin: Tensor) -> Tensor:
    """Draws as vectors ``(S, N)`` in float64, scaled so that their Euclidean norm is the root mean
    square."""
    flat = double(draws.detach() - origin.detach()).reshape(len(draws), -1)
    return flat / flat.shape[1] ** 0.5

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
from pyro_bdl.utils.validation import real_number, whole_number


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
    same_functions(a, b)
    length_scale = median_distance(b) if length_scale is None else length_scale
    scale = real_number(length_scale, "length_scale")
    return _contrast(lambda d: d.square().div_(-2 * scale**2).exp_(), a, b, groups)


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
    groups = None if groups is None else whole_number(groups, "groups", least=2)
    of_x, of_y = (_groups(vectors, groups or 1) for vectors in (x, y))
    parts = [(-2, x, y, of_x, of_y), (1, x, x, of_x, of_x), (1, y, y, of_y, of_y)]
    means = [
        sign * _mean(similarity(torch.cdist(p, q)), of_p, of_q, p is q, groups)
        for sign, p, q, of_p, of_q in parts
    ]
    return torch.stack(means).sum(0)


def _groups(draws: Tensor, groups: int) -> Tensor:
    """The group of neighbors of each draw, ``(S, G)``, 1 for the draw's own and 0 for others."""
    parts = torch.arange(len(draws), device=draws.device).tensor_split(groups)
    return torch.block_diag(*(torch.ones_like(part)[:, None] for part in parts)).to(draws)


def _mean(
    values: Tensor, of_first: Tensor, of_second: Tensor, is_own: bool, groups: int | None
) -> Tensor:
    """The mean of values ``(S1, S2)`` of all pairs of draws; with groups of draws the means
    ``(G,)`` without each group.

    :param of_first: the groups of the first draws; ``of_second`` those of the second.
    :param is_own: whether both are the same draws, of which pairs with themselves are left out.
    """
    sizes = of_first.sum(0)
    counts = sizes[:, None] * of_second.sum(0)
    if is_own and len(values) > 1:
        values.fill_diagonal_(0.0)
        counts = counts - sizes.diag()

    def left(sums: Tensor) -> Tensor:
        if groups is None:
            return sums.sum()
        return sums.sum() - sums.sum(0) - sums.sum(1) + sums.diagonal()

    return left(of_first.mT @ values @ of_second) / left(counts)


def _vectors(draws: Tensor, origin: Tensor) -> Tensor:
    """Draws as vectors ``(S, N)`` in float64, scaled so that their Euclidean norm is the root mean
    square."""
    flat = double(draws.detach() - origin.detach()).reshape(len(draws), -1)
    return flat / flat.shape[1] ** 0.5

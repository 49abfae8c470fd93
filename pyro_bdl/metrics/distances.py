"""Distances between the marginals of two posteriors' functions, or between their predictive
distributions, at each test point, averaged.

``a`` are draws of a function at the test points, ``(S1, N, ...)``, and ``b`` those of the
reference, ``(S2, N, ...)``.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pyro_bdl.diagnostics.rank import sort
from pyro_bdl.metrics.blocks import (
    check_probabilities,
    double_blocks,
    mean_of_draws,
    nan_where,
    same_functions,
    same_shape,
)
from pyro_bdl.utils.precision import double, double_device


def mean_error(a: Tensor, b: Tensor) -> Tensor:
    """Root mean square, over the test points, of the difference of the means of the draws.

    :param a: ``(S1, N, ...)``, draws of a function at the test points.
    :param b: ``(S2, N, ...)``, draws of the reference.
    :returns: a scalar, in the units of the draws.
    :raises ValueError: if the test points differ in shape.
    """
    return _root_mean_square_difference(_mean, a, b)


def sd_error(a: Tensor, b: Tensor) -> Tensor:
    """Root mean square, over the test points, of the difference of the sds of the draws.

    The sd of a single draw is zero: a point estimate.

    :param a: ``(S1, N, ...)``, draws of a function at the test points.
    :param b: ``(S2, N, ...)``, draws of the reference.
    :returns: a scalar, in the units of the draws.
    :raises ValueError: if the test points differ in shape.
    """
    return _root_mean_square_difference(_sd, a, b)


def wasserstein1(a: Tensor, b: Tensor) -> Tensor:
    """Wasserstein-1 distance of the draws at each test point, averaged over the points.

    The area between the two empirical quantile functions, exact for any two sizes::

        W1 = int_0^1 |F_a^-1(u) - F_b^-1(u)| du

    :param a: ``(S1, N, ...)``, draws of a function at the test points.
    :param b: ``(S2, N, ...)``, draws of the reference.
    :returns: a scalar, in the units of the draws.
    :raises ValueError: if the test points differ in shape.

    Source: Villani (2003), Topics in Optimal Transportation, section 2.2.
    """
    return wasserstein_at_points(a, b)[0].mean()


def wasserstein_at_points(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """W1 and the square of W2 at each point, ``(N, ...)`` each, of which ``wasserstein1`` and
    ``wasserstein2`` are the mean and the root of the mean."""
    found = [
        torch.stack([gap.abs() @ width, gap.square() @ width])
        for gap, width in _quantile_gaps(a, b)
    ]
    first, second = torch.cat(found, 1).reshape(2, *b.shape[1:])
    return first, second


def wasserstein1_by_chance(draws: Tensor, *sizes: float) -> float:
    """Expected Wasserstein-1 distance of two samples of one distribution, averaged over the points.

    Empirical distributions of m and n independent draws differ at x by about a Normal number of
    variance F(x) (1 - F(x)) (1 / m + 1 / n), so that::

        E W1 = sqrt(2 / pi (1 / m + 1 / n)) int sqrt(F(x) (1 - F(x))) dx

    :param draws: ``(S, N, ...)``, which give F.
    :param sizes: m and n, in effective draws.

    Source: del Barrio, Gine, Matran (1999), Central limit theorems for the Wasserstein distance
    between the empirical and the true distributions, theorem 1.1.
    """
    device = double_device(draws.device)
    levels = torch.arange(1, len(draws), dtype=torch.float64, device=device) / len(draws)
    weights = (levels * (1 - levels)).sqrt()
    spread = torch.cat([sort(p).diff(dim=-1) @ weights for (p,) in double_blocks(draws)]).mean()
    return float(spread) * math.sqrt(2 / math.pi * sum(1 / size for size in sizes))


def wasserstein2(a: Tensor, b: Tensor) -> Tensor:
    """Wasserstein-2 distance of the draws at each test point, root mean square over the points.

    ::

        W2^2 = int_0^1 (F_a^-1(u) - F_b^-1(u))^2 du

    For Normals W2^2 is ``mean_error^2 + sd_error^2``; the rest is a difference in shape.

    :param a: ``(S1, N, ...)``, draws of a function at the test points.
    :param b: ``(S2, N, ...)``, draws of the reference.
    :returns: a scalar, in the units of the draws.
    :raises ValueError: if the test points differ in shape.

    Source: Villani (2003), Topics in Optimal Transportation, section 2.2.
    """
    return wasserstein_at_points(a, b)[1].mean().sqrt()


def _quantile_gaps(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each block of points the differences of the quantile functions on intervals where
    both are constant, ``(block, steps)``, and the widths of these intervals."""
    same_functions(a, b)
    m, n = a.shape[0], b.shape[0]
    # Both are constant between these points, which are in units of 1 / (m n).
    device = double_device(a.device)
    steps = torch.cat(
        [torch.arange(m + 1, device=device) * n, torch.arange(n + 1, device=device) * m]
    ).unique()
    start, width = steps[:-1], double(steps.diff()) / (m * n)
    for p, q in double_blocks(a, b):
        yield sort(p)[:, start // n] - sort(q)[:, start // m], width


def _root_mean_square_difference(
    statistic: Callable[[Tensor], Tensor], a: Tensor, b: Tensor
) -> Tensor:
    """Root mean square, over the test points, of the difference of a statistic of the draws."""
    same_functions(a, b)
    differences = [statistic(p) - statistic(q) for p, q in double_blocks(a, b)]
    return torch.cat(differences).square().mean().sqrt()


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1)


def _sd(x: Tensor) -> Tensor:
    return x.std(-1, correction=min(1, x.shape[-1] - 1))


def agreement(a: Tensor, b: Tensor) -> Tensor:
    """Share of the test points at which both posteriors predict the same class, from 0 to 1; NaN if
    a probability is.

    :param a: ``(S1, N, C)``, draws of class probabilities; the prediction is the class with the
        largest mean.
    :param b: ``(S2, N, C)``, draws of the reference.
    :raises ValueError: if the test points differ in shape.

    Source: Izmailov et al. (2021), What are Bayesian neural network posteriors really like?
    """
    same_functions(a, b)
    check_probabilities(a, "a")
    check_probabilities(b, "b")
    p, q = mean_of_draws(a), mean_of_draws(b)
    same = double(p.argmax(-1) == q.argmax(-1))
    return nan_where((p + q).isnan().any(-1), same).mean()


def total_variation(a: Tensor, b: Tensor) -> Tensor:
    """Total variation distance of the predictive distributions, 1/N sum_n 1/2 sum_c |p_nc - q_nc|.

    :param a: ``(S1, N, C)``, draws of class probabilities, averaged over the draws.
    :param b: ``(S2, N, C)``, draws of the reference.
    :returns: a scalar from 0 (equal) to 1.
    :raises ValueError: if the test points differ in shape.

    Source: Izmailov et al. (2021), What are Bayesian neural network posteriors really like?
    """
    same_functions(a, b)
    check_probabilities(a, "a")
    check_probabilities(b, "b")
    return (mean_of_draws(a) - mean_of_draws(b)).abs().sum(-1).mean() / 2


def categorical_kl(a: Tensor, b: Tensor) -> Tensor:
    """KL divergence of predictive class distributions, 1/N sum_n sum_c q_nc log(q_nc / p_nc).

    It goes from the reference q, the mean over the draws ``b``, to p, the mean over ``a``. It is
    large if p gives a small probability to a class that is likely under q. A p below the smallest
    number of its floating point type counts as that number.

    :param a: ``(S1, N, C)``, draws of class probabilities.
    :param b: ``(S2, N, C)``, draws of the reference.
    :returns: a scalar, in nats.
    :raises ValueError: if the test points differ in shape.
    """
    same_functions(a, b)
    check_probabilities(a, "a")
    check_probabilities(b, "b")
    p, q = mean_of_draws(a), mean_of_draws(b)
    p = p.clamp_min(torch.finfo(a.dtype).tiny)
    return (torch.xlogy(q, q) - torch.xlogy(q, p)).sum(-1).mean()


def gaussian_kl(a_mean: Tensor, a_variance: Tensor, b_mean: Tensor, b_variance: Tensor) -> Tensor:
    """KL divergence of predictive distributions of numbers, from their first two moments.

    It goes from the reference b to a, between Normals with the moments of the predictive
    distributions, averaged over the test points::

        KL = 1/2 (v_b / v_a + (m_a - m_b)^2 / v_a - 1 + log(v_a / v_b))

    It is exact if the predictive distributions are Normal, and finite for a point mass with noise.

    :param a_mean: ``(N, ...)``, the predictive means.
    :param a_variance: ``(N, ...)``, the predictive variances, noise included.
    :param b_mean: ``(N, ...)``, the reference's predictive means.
    :param b_variance: ``(N, ...)``, the reference's predictive variances.
    :returns: a scalar, in nats.
    :raises ValueError: if the shapes differ.
    """
    same_shape("a_mean", a_mean, "a_variance", a_variance)
    same_shape("b_mean", b_mean, "b_variance", b_variance)
    same_shape("a_mean", a_mean, "b_mean", b_mean)
    m_a, v_a, m_b, v_b = (double(t) for t in (a_mean, a_variance, b_mean, b_variance))
    return ((v_b + (m_a - m_b).square()) / v_a - 1 + (v_a / v_b).log()).mean() / 2

"""Distances between two predictive distributions, of classes or of numbers."""

import torch
from torch import Tensor

from pyro_bdl.metrics.blocks import (
    check_probabilities,
    mean_of_draws,
    nan_where,
    same_functions,
    same_shape,
)
from pyro_bdl.utils.precision import double


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

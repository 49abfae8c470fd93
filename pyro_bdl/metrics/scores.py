"""Scores of predictions on test data."""

import math

import torch
from torch import Tensor

from pyro_bdl.diagnostics.rank import sort
from pyro_bdl.metrics.blocks import blocks, checked_labels, same_points, same_shape


def rmse(mean: Tensor, y: Tensor) -> Tensor:
    """Root mean square error, sqrt(mean_n (mean_n - y_n)^2).

    :param mean: ``(N, ...)``, the predictive mean, in the units of the target.
    :param y: ``(N, ...)``, the observed targets.
    :raises ValueError: if the shapes differ.
    """
    same_shape("mean", mean, "y", y)
    return (mean.double() - y.double()).square().mean().sqrt()


def accuracy(probabilities: Tensor, y: Tensor) -> Tensor:
    """Share of test points whose most probable class is the observed one, from 0 to 1.

    :param probabilities: ``(N, C)``.
    :param y: ``(N,)``, class indices.
    :raises ValueError: if the shapes do not fit, or a label is not in 0 ... C - 1.
    """
    labels = checked_labels(probabilities, y)
    return (probabilities.argmax(-1) == labels).double().mean()


def negative_log_predictive_density(log_likelihood: Tensor) -> Tensor:
    """Mean negative log predictive density, -1/N sum_n log(1/S sum_s p(y_n | w_s)), in nats.

    :param log_likelihood: ``(S, N)``, log p(y_n | w_s) of each test point under each draw.
    :raises ValueError: if it does not have two axes.

    Source: Gelman, Hwang, Vehtari (2014), Understanding predictive information criteria for
    Bayesian models.
    """
    _check_density(log_likelihood)
    sums = [part.double().logsumexp(-1) for (part,) in blocks(log_likelihood)]
    return math.log(log_likelihood.shape[0]) - torch.cat(sums).mean()


def expected_negative_log_likelihood(log_likelihood: Tensor) -> Tensor:
    """Negative log likelihood averaged over draws, -1/(S N) sum_s sum_n log p(y_n | w_s), in nats.

    It is the loss of a single draw, E_q[NLL]. It is at least the loss of their mean,
    :func:`negative_log_predictive_density`, by Jensen's inequality.

    :param log_likelihood: ``(S, N)``, log p(y_n | w_s) of each test point under each draw.
    :raises ValueError: if it does not have two axes.

    Source: the NLL of Huix et al. (2022), Variational inference of overparameterized Bayesian
    neural networks, section 5.
    """
    _check_density(log_likelihood)
    return -log_likelihood.double().mean()


def crps(draws: Tensor, y: Tensor) -> Tensor:
    """Continuous ranked probability score, mean_n E|X - y_n| - 1/2 E|X - X'|; smaller is better.

    This is the fair estimate: X and X' are different draws, so its expectation over independent
    draws is the score of their distribution, for any number of draws S::

        1/S sum_s |x_s - y| - 1 / (S (S - 1)) sum_s (2 s - S - 1) x_(s)

    with x_(1) <= ... <= x_(S).

    :param draws: ``(S, N, ...)``, draws of the target (noise included), S at least 2.
    :param y: ``(N, ...)``.
    :returns: a scalar, in the units of the target.
    :raises ValueError: if the shapes do not fit, or there is a single draw.

    Source: Gneiting & Raftery (2007), Strictly proper scoring rules, section 4.2; Ferro (2014),
    Fair scores for ensemble forecasts.
    """
    same_points(draws, y)
    size = draws.shape[0]
    if size < 2:
        raise ValueError("crps needs at least 2 draws, but draws has 1: draw more")
    weight = torch.arange(1 - size, size, 2, dtype=torch.float64, device=draws.device)
    scores = []
    for part, target in blocks(draws, y[None]):
        ordered = sort(part.double())
        error = (ordered - target.double()).abs().mean(-1)
        scores.append(error - ordered @ weight / (size * (size - 1)))
    return torch.cat(scores).mean()


def brier(probabilities: Tensor, y: Tensor) -> Tensor:
    """Brier score, 1/N sum_n sum_c (p_nc - [y_n = c])^2, from 0 (best) to 2.

    :param probabilities: ``(N, C)``.
    :param y: ``(N,)``, class indices.
    :raises ValueError: if the shapes do not fit, or a label is not in 0 ... C - 1.

    Source: Brier (1950), Verification of forecasts expressed in terms of probability.
    """
    labels = checked_labels(probabilities, y)
    observed = torch.nn.functional.one_hot(labels, probabilities.shape[-1])
    return (probabilities.double() - observed).square().sum(-1).mean()


def _check_density(log_likelihood: Tensor) -> None:
    if log_likelihood.dim() != 2:
        raise ValueError(
            f"log_likelihood must have shape (draws, points), but has shape "
            f"{tuple(log_likelihood.shape)}"
        )

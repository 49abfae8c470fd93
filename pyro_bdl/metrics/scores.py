"""Scores of predictions on test data."""

import math

import torch
from torch import Tensor

from pyro_bdl.diagnostics.rank import sort
from pyro_bdl.metrics.blocks import blocks, checked_labels, nan_where, same_points, same_shape
from pyro_bdl.utils.precision import double, double_device
from pyro_bdl.utils.validation import require_tensors

_SHIFTS = 32  # of the components of a mixture of Normals, for CRPS


def rmse(mean: Tensor, y: Tensor) -> Tensor:
    """Root mean square error, sqrt(mean_n (mean_n - y_n)^2).

    :param mean: ``(N, ...)``, the predictive mean, in the units of the target.
    :param y: ``(N, ...)``, the observed targets.
    :raises ValueError: if the shapes differ.
    """
    same_shape("mean", mean, "y", y)
    return squared_error(mean, y).mean().sqrt()


def squared_error(mean: Tensor, y: Tensor) -> Tensor:
    """Squared errors (mean_n - y_n)^2, ``(N, ...)``; the RMSE is the root of their mean.

    :param mean: ``(N, ...)``, the predictive mean.
    :param y: ``(N, ...)``, the observed targets.
    :raises ValueError: if the shapes differ.
    """
    same_shape("mean", mean, "y", y)
    return (double(mean) - double(y)).square()


def accuracy(probabilities: Tensor, y: Tensor, *, pointwise: bool = False) -> Tensor:
    """Share of test points whose most probable class is the observed one, from 0 to 1; NaN if a
    probability is.

    :param probabilities: ``(N, C)``.
    :param y: ``(N,)``, class indices.
    :param pointwise: return 1 or 0 for each point, ``(N,)``, in place of the mean.
    :raises ValueError: if the shapes do not fit, or a label is not in 0 ... C - 1.
    """
    labels = checked_labels(probabilities, y)
    right = double(probabilities.argmax(-1).to(labels.device) == labels)
    return _mean(nan_where(probabilities.isnan().any(-1), right), pointwise)


def negative_log_predictive_density(log_likelihood: Tensor, *, pointwise: bool = False) -> Tensor:
    """Mean negative log predictive density, -1/N sum_n log(1/S sum_s p(y_n | w_s)), in nats.

    :param log_likelihood: ``(S, N)``, log p(y_n | w_s) of each test point under each draw.
    :param pointwise: return the value of each point, ``(N,)``, in place of the mean.
    :raises ValueError: if it does not have two axes.

    Source: Gelman, Hwang, Vehtari (2014), Understanding predictive information criteria for
    Bayesian models.
    """
    return _mean(-log_predictive_density(log_likelihood), pointwise)


def log_predictive_density(log_likelihood: Tensor) -> Tensor:
    """log(1/S sum_s p(y_n | w_s)) of each test point, float64 ``(N,)``, in nats.

    :param log_likelihood: ``(S, N)``, log p(y_n | w_s) of each test point under each draw.
    :raises ValueError: if it does not have two axes.
    """
    _check_density(log_likelihood)
    sums = [double(part).logsumexp(-1) for (part,) in blocks(log_likelihood)]
    return torch.cat(sums) - math.log(log_likelihood.shape[0])


def expected_negative_log_likelihood(log_likelihood: Tensor, *, pointwise: bool = False) -> Tensor:
    """Negative log likelihood averaged over draws, -1/(S N) sum_s sum_n log p(y_n | w_s), in nats.

    It is the loss of a single draw, E_q[NLL]. It is at least the loss of their mean,
    :func:`negative_log_predictive_density`, by Jensen's inequality.

    :param log_likelihood: ``(S, N)``, log p(y_n | w_s) of each test point under each draw.
    :param pointwise: return the loss of each point, ``(N,)``, in place of the mean.
    :raises ValueError: if it does not have two axes.

    Source: the NLL of Huix et al. (2022), Variational inference of overparameterized Bayesian
    neural networks, section 5.
    """
    _check_density(log_likelihood)
    return _mean(-double(log_likelihood).mean(0), pointwise)


def gaussian_nlpd(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """Negative log density of each target under the Normal with the predictive moments, in nats::

        1/2 log(2 pi v_n) + (y_n - m_n)^2 / (2 v_n)

    Where the noise is much smaller than the sd of the function, the density of a mixture of draws
    depends on the few draws that pass near the target, and on their number; this one does not.

    :param mean: ``(N, ...)``, the predictive means m.
    :param variance: ``(N, ...)``, the predictive variances v, noise included.
    :param y: ``(N, ...)``, the observed targets.
    :returns: float64 ``(N, ...)``.
    :raises ValueError: if the shapes differ.

    Source: the Dawid-Sebastiani score, Gneiting & Raftery (2007), Strictly proper scoring rules,
    eq. 25.
    """
    same_shape("mean", mean, "variance", variance)
    v = double(variance)
    return ((2 * math.pi * v).log() + squared_error(mean, y) / v) / 2


def effective_draws(log_likelihood: Tensor) -> Tensor:
    """Number of draws that the predictive density of each point rests on, (sum_s p)^2 / sum_s p^2.

    :param log_likelihood: ``(S, N)``, log p(y_n | w_s).
    :returns: float64 ``(N,)``, from 1 (one draw alone) to S (all alike); NaN if all densities are
        zero.

    Source: Kong (1992), A note on importance sampling using standardized weights.
    """
    found = []
    for (part,) in blocks(log_likelihood):
        log_p = double(part)
        found.append((2 * log_p.logsumexp(-1) - (2 * log_p).logsumexp(-1)).exp())
    return torch.cat(found)


def crps(
    draws: Tensor, y: Tensor, *, upper: Tensor | None = None, pointwise: bool = False
) -> Tensor:
    """Continuous ranked probability score, mean_n E|X - y_n| - 1/2 E|X - X'|; smaller is better.

    It is the integral of F^2 below y and (1 - F)^2 above, of a censored target below its lower end
    y and above its upper end u, E(y - max(X, X'))+ + E(min(X, X') - u)+. X and X' are different
    draws, so its expectation is the score of their distribution for any number S of draws.

    :param draws: ``(S, N, ...)``, draws of the target (noise included), S at least 2.
    :param y: ``(N, ...)``; ``upper`` as of :func:`pit`, of targets known to lie between both.
    :param pointwise: return the score of each target, with the shape of y, in place of the mean.
    :returns: a scalar, in the units of the target.
    :raises ValueError: if the shapes do not fit, or there is a single draw.

    Source: Gneiting & Raftery (2007), Strictly proper scoring rules, section 4.2; Ferro (2014),
    Fair scores for ensemble forecasts; Avati et al. (2019), Countdown regression, of censored ones.
    """
    same_points(draws, y)
    size = draws.shape[0]
    if size < 2:
        raise ValueError("crps needs at least 2 draws, but draws has 1: draw more")
    device = double_device(draws.device)
    below = torch.arange(size, dtype=torch.float64, device=device) * (2 / (size * (size - 1)))
    above = below.flip(0)  # pairs of which a draw is the smaller one, below: the larger one
    end = y if upper is None else upper
    same_shape("upper", end, "y", y)
    scores = []
    for part, low, high in blocks(draws, y[None], end[None]):
        ordered = sort(double(part))
        missing = (double(low) - ordered).clamp_min(0.0) @ below
        scores.append(missing + (ordered - double(high)).clamp_min(0.0) @ above)
    return _mean(torch.cat(scores).reshape(y.shape), pointwise)


def crps_of_normals(mean: Tensor, sd: Tensor, y: Tensor) -> Tensor:
    """Continuous ranked probability score of a mixture of S Normals, E|Y - y| - E|Y - Y'| / 2.

    Both expectations are in closed form for each pair of components. Of more than 64 components
    each is paired with 32 others, evenly spaced in their order, so that draws that follow chain by
    chain or member by member are paired across these as often as all pairs are.

    :param mean: ``(S, ...)``; ``sd`` likewise; ``y`` is ``(...)``.
    :returns: the score of each target, as y.

    Source: Grimit et al. (2006), The continuous ranked probability score for circular variables
    and its application to mesoscale forecast ensemble verification, eq. 5.
    """
    count = len(mean)
    shifts = list(range(1, count))
    if count > 2 * _SHIFTS:  # k and S - k make the same pairs
        shifts = [round((j + 0.5) * count / (2 * _SHIFTS)) for j in range(_SHIFTS)]
    own, others = _absolute(torch.zeros_like(mean), math.sqrt(2) * sd).mean(0), torch.zeros_like(y)
    for k in shifts:
        both = (sd.square() + sd.roll(k, 0).square()).sqrt()
        others = others + _absolute(mean - mean.roll(k, 0), both).mean(0) / len(shifts)
    spread = own / count + (1 - 1 / count) * others
    return _absolute(y - mean, sd).mean(0) - 0.5 * spread


def _absolute(mean: Tensor, sd: Tensor) -> Tensor:
    """E|X| of a Normal."""
    z = mean / sd
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    return mean * (2 * torch.special.ndtr(z) - 1) + 2 * sd * density


def brier(probabilities: Tensor, y: Tensor, *, pointwise: bool = False) -> Tensor:
    """Brier score, 1/N sum_n sum_c (p_nc - [y_n = c])^2, from 0 (best) to 2.

    :param probabilities: ``(N, C)``.
    :param y: ``(N,)``, class indices.
    :param pointwise: return the score of each point, ``(N,)``, in place of the mean.
    :raises ValueError: if the shapes do not fit, or a label is not in 0 ... C - 1.

    Source: Brier (1950), Verification of forecasts expressed in terms of probability.
    """
    labels = checked_labels(probabilities, y)
    observed = torch.nn.functional.one_hot(labels, probabilities.shape[-1])
    return _mean((double(probabilities) - observed).square().sum(-1), pointwise)


def ranked_probability_score(
    probabilities: Tensor, y: Tensor, *, pointwise: bool = False
) -> Tensor:
    """Ranked probability score of ordered classes, 1/N sum_n sum_k (P_n(y <= k) - [y_n <= k])^2,
    from 0 (best) to C - 1. It is the CRPS of the class numbers: a class that is further from the
    observed one costs more.

    :param probabilities: ``(N, C)``, of the classes in their order.
    :param y: ``(N,)``, class indices.
    :param pointwise: return the score of each point, ``(N,)``, in place of the mean.
    :raises ValueError: if the shapes do not fit, or a label is not in 0 ... C - 1.

    Source: Epstein (1969), A scoring system for probability forecasts of ranked categories.
    """
    labels = checked_labels(probabilities, y)
    observed = torch.nn.functional.one_hot(labels, probabilities.shape[-1])
    gaps = (double(probabilities) - observed).cumsum(-1)[..., :-1]
    return _mean(gaps.square().sum(-1), pointwise)


def _check_density(log_likelihood: Tensor) -> None:
    require_tensors(log_likelihood=log_likelihood)
    if log_likelihood.dim() != 2:
        raise ValueError(
            f"log_likelihood must have shape (draws, points), but has shape "
            f"{tuple(log_likelihood.shape)}"
        )


def _mean(values: Tensor, pointwise: bool) -> Tensor:
    return values if pointwise else values.mean()

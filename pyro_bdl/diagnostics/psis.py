"""Pareto smoothed importance sampling."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_bdl.diagnostics.blocks import map_blocks
from pyro_bdl.diagnostics.rank import largest
from pyro_bdl.utils.validation import real_number

_LEAST_TAIL = 5
_EPSILON = torch.finfo(torch.float64).eps
_TINY = torch.finfo(torch.float64).tiny


class PSIS(NamedTuple):
    """The result of ``psis``.

    :param log_weights: float64 ``(chains, draws, ...)``, smoothed; their exponentials sum to 1
        over all draws.
    :param pareto_k: float64 ``(...)``, k-hat, the shape of the tail.
    """

    log_weights: Tensor
    pareto_k: Tensor


def psis(log_ratios: Tensor, *, r_eff: float = 1.0) -> PSIS:
    """Pareto smoothed importance weights, and the k-hat that says whether to trust them.

    The largest ratios are replaced by the expected order statistics of a generalized Pareto
    distribution fitted to them, and truncated at the largest ratio. Its shape k-hat measures how
    heavy the tail is: up to ``good_k`` (0.7 for many draws) estimates are reliable, above 1 the
    ratios have no mean.

    :param log_ratios: log of target over proposal, ``(chains, draws, ...)``, up to a constant; for
        draws of a guide log p - log q, ``(1, draws)``.
    :param r_eff: effective sample size of the draws over their number; determines the size of the
        tail.
    :returns: the weights and k-hat. With too few draws for a tail of five (24 or fewer)
        there is no smoothing and k-hat is infinite. If all ratios in the tail are equal, or the fit
        fails, there is no smoothing and k-hat is NaN. If a quarter of the ratios in the tail are
        zero beside the largest, k-hat is infinite.
    :raises TypeError: if ``log_ratios`` is not a real tensor.
    :raises ValueError: for an ``r_eff`` that is not positive, fewer than two axes or 4 draws a
        chain.

    Source: Vehtari, Simpson, Gelman, Yao, Gabry (2024), Pareto smoothed importance sampling,
    Algorithm 1. Equal to PSIS of ArviZ 1.x, which raises errors for equal ratios and for few draws.
    """
    check_efficiency(r_eff)

    def statistic(x: Tensor) -> Tensor:
        log_weights, k, _ = smooth(x.flatten(1), r_eff)
        return torch.cat([log_weights.T, k[None]])

    found = map_blocks(statistic, log_ratios)
    return PSIS(found[:-1].reshape(log_ratios.shape), found[-1])


def good_k(num_draws: int) -> float:
    """The largest k-hat at which S draws still give a reliable estimate.

    It is min(1 - 1 / log10(S), 0.7): Vehtari et al. (2024), Pareto smoothed importance sampling,
    section 3.2.4.
    """
    return min(1 - 1 / math.log10(num_draws), 0.7)


def check_efficiency(r_eff: float) -> None:
    """Check that the relative efficiency is a positive number."""
    real_number(r_eff, "r_eff, the ESS over S,")


def smooth(log_ratios: Tensor, r_eff: float) -> tuple[Tensor, Tensor, Tensor]:
    """Normalized smoothed log weights ``(block, S)``, k-hat, and the share that the weights lack of
    the fitted tail's mean, ``(block,)`` each, of each row.

    The weights of the tail are quantiles, none above the largest ratio, whose sum is less than m
    times the mean of the Pareto distribution beyond the threshold u, u + sigma / (1 - k). This k is
    not shrunk, but is at most ``good_k``, beyond which the mean is not known. The share is of the
    sum of all weights; 0 without a fit.

    :param log_ratios: float64 ``(block, S)``.
    """
    x = log_ratios - log_ratios.amax(-1, keepdim=True)
    count = tail_size(x.shape[-1], r_eff)
    if count < _LEAST_TAIL:
        k = torch.full_like(x[:, 0], torch.inf)
        return x.log_softmax(-1), k, torch.zeros_like(k)
    top = largest(x, count + 1)
    threshold, tail = top.values[:, :1], top.values[:, 1:]
    smoothed, k, mean = _smooth_tail(tail, threshold, good_k(x.shape[-1]))
    x = x.scatter(-1, top.places[:, 1:], smoothed)
    lacking = count * mean - smoothed.exp().sum(-1)
    lacking = torch.where(k.isfinite(), lacking / x.exp().sum(-1), 0.0)
    return x.log_softmax(-1), k, lacking


def tail_size(num_draws: int, r_eff: float) -> int:
    """The number of ratios in the tail, 3 sqrt(S / r_eff) of many draws and S / 5 of few."""
    size = 3 * math.sqrt(num_draws / r_eff) if num_draws * r_eff > 225 else num_draws / 5
    return min(math.floor(size), num_draws - 1)


def _smooth_tail(tail: Tensor, threshold: Tensor, most: float) -> tuple[Tensor, Tensor, Tensor]:
    """Smoothed log ratios of the tails, k-hat, and the mean ratio of the fitted tails.

    :param tail: ``(block, m)``, ascending log ratios, the largest 0.
    :param threshold: ``(block, 1)``, the log ratio where the tail begins.
    :param most: the largest k of a mean.
    """
    size = tail.shape[-1]
    offset = threshold.exp()
    excess = tail.exp() - offset
    fit = fit_pareto(excess)
    k = torch.where(fit.k.isnan(), torch.inf, fit.k)
    quarter = int(size / 4 + 0.5) - 1
    flat = (tail[:, -1] - tail[:, 0]).abs() < _TINY
    k = torch.where(flat | (excess[:, quarter] <= excess[:, 0]), torch.nan, k)
    k = torch.where(tail[:, quarter] < math.log(_TINY), torch.inf, k)  # a few draws have it all
    place = (torch.arange(size, dtype=tail.dtype, device=tail.device) + 0.5) / size
    expected = (pareto_quantile(place.expand_as(tail), fit) + offset).log()
    expected = torch.where(expected > 0, 0, expected)
    own = ((fit.k * (size + 10) - 5) / size).clamp_max(most)  # not shrunk, as ``fit_pareto`` does
    mean = offset[:, 0] + fit.sigma / (1 - own)
    return torch.where(k.isfinite()[:, None], expected, tail), k, mean


# ------------------------------------------------------- the generalized Pareto distribution


class ParetoFit(NamedTuple):
    """Shape k and scale sigma of the density (1 + k x / sigma)^(-1/k - 1) / sigma, x > 0."""

    k: Tensor
    sigma: Tensor


def fit_pareto(x: Tensor) -> ParetoFit:
    """Empirical Bayes estimate of a generalized Pareto distribution for each row.

    With b = -k / sigma, on a grid of 30 + sqrt(n) values b_j::

        k_j = mean_i log(1 - b_j x_i)
        w_j ~ exp(n (log(-b_j / k_j) - k_j - 1)),    b = sum_j w_j b_j
        k = mean_i log(1 - b x_i),    sigma = -k / b

    Finally k is shrunk toward 0.5 with the weight of ten observations: (n k + 5) / (n + 10).

    :param x: float64 ``(block, n)``, ascending, with n at least 5.
    :returns: k and sigma, ``(block,)`` each; NaN if a row cannot be fitted.

    Source: Zhang & Stephens (2009), A new and efficient estimation method for the generalized
    Pareto distribution; Vehtari et al. (2024), Pareto smoothed importance sampling, appendix C.
    Equal to ArviZ's fit.
    """
    n = x.shape[-1]
    points = 30 + math.isqrt(n)
    number = torch.arange(1, points + 1, dtype=x.dtype, device=x.device)
    first_quartile = x[:, int(n / 4 + 0.5) - 1, None]
    grid = (1 - (points / (number - 0.5)).sqrt()) / (3 * first_quartile)
    grid = grid + 1 / x[:, -1:]

    def mean_log(b: Tensor) -> Tensor:
        return (-b[..., None] * x[:, None]).log1p_().sum(-1) / n

    shape = mean_log(grid)
    weight = (n * ((-grid / shape).log() - shape - 1)).softmax(-1)
    weight = torch.where(weight >= 10 * _EPSILON, weight, 0)
    b = (torch.where(weight > 0, grid, 0) * weight).sum(-1) / weight.sum(-1)
    k = mean_log(b[:, None]).squeeze(-1)
    return ParetoFit((n * k + 5) / (n + 10), -k / b)


def pareto_quantile(p: Tensor, fit: ParetoFit) -> Tensor:
    """The quantile sigma ((1 - p)^-k - 1) / k; for k = 0 that of the exponential distribution.

    :param p: ``(block, m)``.
    :param fit: k and sigma, ``(block,)`` each.
    :returns: ``(block, m)``, NaN for a scale that is not positive.
    """
    k, sigma = fit.k[:, None], fit.sigma[:, None]
    exponent = -torch.log1p(-p)
    value = torch.where(k.abs() < _EPSILON, exponent, (k * exponent).expm1() / k)
    return torch.where(sigma > 0, sigma * value, torch.nan)

"""The generalized Pareto distribution: quantiles, and fits to the tails of many samples."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

_EPSILON = torch.finfo(torch.float64).eps


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

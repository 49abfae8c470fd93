"""Bayesian linear regression in closed form, from sufficient statistics.

    y_nk = w_k' phi_n + e_nk,   e_nk ~ Normal(0, 1 / beta_k),   w_kh ~ Normal(0, 1 / alpha_kh)

for N rows, H features and K outputs. Phi'Phi, Phi'Y, the squares of Y and N are sufficient
statistics, which are sums over batches. Given them

    C_k = (beta_k Phi'Phi + diag(alpha_k))^-1,   m_k = beta_k C_k Phi'y_k

are the posterior's covariance and mean. The log evidence is log N(y_k; 0, Phi diag(1 / alpha_k)
Phi' + I / beta_k), and the predictive is N(m_k' phi, 1 / beta_k + phi' C_k phi) (Bishop 2006,
sections 3.3 to 3.5). Statistics and factorizations are in float64.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_bdl.utils.linear_algebra import cholesky
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.validation import real_number, whole_number

__all__ = [
    "SufficientStatistics",
    "log_evidence",
    "maximize",
    "posterior",
    "predict",
]

_SMALLEST = 1e-12  # lower bound of divisors, and of residuals relative to the targets' squares


@dataclass(frozen=True)
class SufficientStatistics:
    """Sufficient statistics of the data of a linear regression; batches add up by ``+``.

    :param gram: Phi'Phi, (H, H).
    :param cross: Phi'Y, (H, K).
    :param squares: the sum of y_nk^2 over n, (K,).
    :param count: N, the sum of the rows' weights, a scalar.
    """

    gram: Tensor
    cross: Tensor
    squares: Tensor
    count: Tensor

    @classmethod
    def of(
        cls, features: Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> "SufficientStatistics":
        """The statistics of one batch, differentiable in all arguments.

        :param features: phi, (N, H).
        :param targets: y, (N, K), or (N,) for a single output.
        :param weights: the weight of each row, (N,); by default 1.
        :raises ValueError: for shapes that do not fit.
        """
        if features.dim() != 2 or targets.shape[:1] != features.shape[:1]:
            raise ValueError(
                "features must have shape (N, H) and targets (N, K) or (N,), got "
                f"{tuple(features.shape)} and {tuple(targets.shape)}"
            )
        phi, y = double(features), double(targets).reshape(len(features), -1)
        once = phi.new_ones(len(phi)) if weights is None else double(weights)
        weighted = phi * once[:, None]
        return cls(weighted.mT @ phi, weighted.mT @ y, once @ y.square(), once.sum())

    def __add__(self, other: "SufficientStatistics") -> "SufficientStatistics":
        return SufficientStatistics(
            self.gram + other.gram,
            self.cross + other.cross,
            self.squares + other.squares,
            self.count + other.count,
        )


class LinearPosterior(NamedTuple):
    """The Gaussian posterior of the weights.

    :param mean: m, (K, H).
    :param covariance: C, (K, H, H), or (1, H, H) if all outputs share it.
    """

    mean: Tensor
    covariance: Tensor


def posterior(
    statistics: SufficientStatistics, alpha: Tensor | float, beta: Tensor | float
) -> LinearPosterior:
    """N(m_k, C_k), the posterior of the weights of each output.

    :param alpha: the prior's precision: one for all weights, (H,) or (K, H).
    :param beta: the noise's precision: one for all outputs, or (K,).
    """
    factor, right = _system(statistics, alpha, beta)
    mean = torch.cholesky_solve(right, factor)[..., 0]
    return LinearPosterior(mean, torch.cholesky_inverse(factor))


def log_evidence(
    statistics: SufficientStatistics, alpha: Tensor | float, beta: Tensor | float
) -> Tensor:
    """log p(Y | alpha, beta), in nats, summed over the outputs; a scalar, differentiable.

        sum_k  N/2 log beta_k + 1/2 sum_h log alpha_kh - 1/2 log det C_k^-1 - N/2 log 2 pi
               - 1/2 (beta_k y_k'y_k - b_k' C_k b_k),   b_k = beta_k Phi'y_k

    :param alpha: as in ``posterior``.
    :param beta: as in ``posterior``.
    """
    factor, right = _system(statistics, alpha, beta)
    prior, noise = _expanded(statistics, alpha, beta)
    outputs = len(statistics.squares)
    whitened = torch.linalg.solve_triangular(factor, right, upper=False)
    misfit = (noise * statistics.squares).sum() - whitened.square().sum()
    determinant = 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum() * (outputs / len(factor))
    scales = prior.log().sum() * (outputs / len(prior))
    noises = statistics.count * (noise.log() - math.log(2 * math.pi)).sum()
    return 0.5 * (noises + scales - determinant - misfit)


class FixedPoint(NamedTuple):
    """The end of the fixed-point iteration of ``maximize``.

    :param alpha: the prior's precision, a scalar.
    :param beta: the noise's precision, a scalar.
    :param gamma: the effective number of parameters, between 0 and K H.
    :param log_evidence: the log evidence at these values, in nats.
    :param steps: the number of steps taken.
    """

    alpha: Tensor
    beta: Tensor
    gamma: Tensor
    log_evidence: Tensor
    steps: int


@torch.no_grad()
def maximize(
    statistics: SufficientStatistics,
    *,
    alpha: float | None = None,
    beta: float | None = None,
    steps: int = 1000,
    tolerance: float = 1e-9,
) -> FixedPoint:
    """Maximize the evidence in alpha and beta, which all weights and outputs share.

    It iterates alpha = gamma / m'm and beta = (N K - gamma) / residual with gamma = K sum_i beta
    l_i / (alpha + beta l_i), where l_i are the eigenvalues of Phi'Phi (MacKay 1992, section 3;
    Bishop 2006, equations 3.92 and 3.95). After one eigendecomposition a step takes O(H K)
    operations.

    :param alpha: a fixed value of alpha; by default it starts from 1.
    :param beta: a fixed value of beta; by default it starts from 1 / mean(y^2).
    :param steps: the largest number of steps.
    :param tolerance: stop when neither changes by more than this fraction.
    """
    steps = whole_number(steps, "steps")
    tolerance = real_number(tolerance, "tolerance", "[0, inf)")
    alpha = None if alpha is None else real_number(alpha, "alpha")
    beta = None if beta is None else real_number(beta, "beta")
    eigenvalues, basis = torch.linalg.eigh(statistics.gram)
    eigenvalues = eigenvalues.clamp(min=0.0)[:, None]
    cross, squares = basis.mT @ statistics.cross, statistics.squares.sum()
    outputs = statistics.cross.shape[1]
    cells = statistics.count * outputs
    a = squares.new_tensor(1.0 if alpha is None else alpha)
    b = cells / squares.clamp(min=_SMALLEST) if beta is None else squares.new_tensor(beta)
    step, moved = 0, math.inf
    while step < steps and moved >= tolerance:
        step += 1
        gamma = outputs * (b * eigenvalues / (a + b * eigenvalues)).sum()
        mean = b * cross / (a + b * eigenvalues)
        new_a, new_b = a, b
        if alpha is None:
            new_a = gamma / mean.square().sum().clamp(min=_SMALLEST)
        if beta is None:
            residual = squares - 2.0 * (mean * cross).sum() + (eigenvalues * mean.square()).sum()
            free = (cells - gamma).clamp(min=_SMALLEST)
            new_b = free / residual.clamp(min=float(_SMALLEST * squares.clamp(min=_SMALLEST)))
        moved = float(torch.stack([new_a / a, new_b / b]).log().abs().max())
        if math.isnan(moved):
            raise ValueError("the statistics hold NaN or infinity: there is no evidence of them")
        a, b = new_a, new_b
    gamma = outputs * (b * eigenvalues / (a + b * eigenvalues)).sum()
    return FixedPoint(a, b, gamma, log_evidence(statistics, a, b), step)


def predict(
    features: Tensor, weights: LinearPosterior, beta: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Mean and variance of y at new features: m_k' phi and 1 / beta_k + phi' C_k phi, both (N, K).

    :param features: phi, (N, H).
    :param weights: the result of ``posterior``.
    :param beta: as in ``posterior``.
    """
    phi = features.to(weights.mean)
    spread = torch.einsum("nh,khj,nj->nk", phi, weights.covariance, phi)
    noise = torch.as_tensor(beta, dtype=phi.dtype, device=phi.device).reciprocal()
    mean = phi @ weights.mean.mT
    return mean, (spread + noise).expand_as(mean)


def _expanded(
    statistics: SufficientStatistics, alpha: Tensor | float, beta: Tensor | float
) -> tuple[Tensor, Tensor]:
    """alpha as (1 or K, H) and beta as (K,), of the statistics' type."""
    gram, outputs = statistics.gram, len(statistics.squares)
    prior = torch.as_tensor(alpha, device=gram.device).to(gram)
    prior = prior.expand(len(prior) if prior.dim() == 2 else 1, len(gram))
    return prior, torch.as_tensor(beta, device=gram.device).to(gram).expand(outputs)


def _system(
    statistics: SufficientStatistics, alpha: Tensor | float, beta: Tensor | float
) -> tuple[Tensor, Tensor]:
    """The Cholesky factors of C_k^-1, (1 or K, H, H), and b_k as (K, H, 1)."""
    prior, noise = _expanded(statistics, alpha, beta)
    shared = torch.as_tensor(beta, device=statistics.gram.device).dim() == 0 and len(prior) == 1
    precisions = (noise[:1] if shared else noise)[:, None, None] * statistics.gram
    precisions = precisions + torch.diag_embed(prior)
    factors = [cholesky(matrix, "the precision of the weights") for matrix in precisions]
    return torch.stack(factors), (statistics.cross * noise).mT[..., None]

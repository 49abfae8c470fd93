"""The algebra of Normal(0, diag(s^2) + W W')."""

import torch
from torch import Tensor


class LowRankCovariance:
    """N(0, diag(s^2) + W W') with the methods of a precision that a density needs.

    :param scale: s (P,).
    :param factor: W (P, rank).
    """

    def __init__(self, scale: Tensor, factor: Tensor) -> None:
        self.scale, self.factor = scale.detach().clone(), factor.detach().clone()
        self.tril = capacitance_tril(self.scale, self.factor)

    def logdet(self) -> Tensor:
        """log det of the precision."""
        return -log_determinant(self.scale, self.tril)

    def quadratic(self, x: Tensor) -> Tensor:
        return quadratic_form(x, self.scale, self.factor, self.tril)

    def sample(self, num_samples: int) -> Tensor:
        rows, rank = self.factor.shape
        like = self.factor
        noise = torch.randn(num_samples, rows + rank, dtype=like.dtype, device=like.device)
        own, common = noise.split([rows, rank], -1)
        return self.scale * own + common @ self.factor.mT

    def diagonal(self) -> Tensor:
        """The diagonal of the precision (P,): s^-2 - s^-4 diag(W K^-1 W')."""
        columns = (self.factor / self.scale[:, None]).double()
        inner = torch.linalg.solve_triangular(self.tril, columns.mT, upper=False)
        return ((1.0 - inner.square().sum(0)) / self.scale.double().square()).to(self.scale)


def capacitance_tril(scale: Tensor, factor: Tensor) -> Tensor:
    """The Cholesky factor of 1 + W' diag(s)^-2 W, (rank, rank), in float64.

    :param scale: s (P,).
    :param factor: W (P, rank).
    """
    columns = factor / scale[:, None]
    eye = torch.eye(factor.shape[1], dtype=torch.float64, device=factor.device)
    return torch.linalg.cholesky(eye + (columns.mT @ columns).double())


def log_determinant(scale: Tensor, tril: Tensor) -> Tensor:
    """log det (diag(s^2) + W W') = 2 sum_i log s_i + 2 sum_k log L_kk, a scalar.

    :param scale: s (P,).
    :param tril: L, of ``capacitance_tril`` (rank, rank).
    """
    return 2.0 * (scale.log().sum() + tril.diagonal().log().sum().to(scale))


def quadratic_form(x: Tensor, scale: Tensor, factor: Tensor, tril: Tensor) -> Tensor:
    """x' (diag(s^2) + W W')^-1 x = min over a of |z - F a|^2 + |a|^2, with z = x / s and
    F = W / s; the minimum is at a = (1 + F' F)^-1 F' z.

    It is Woodbury's |z|^2 - z' F a without the difference of large numbers, which single
    precision does not bear where W is much larger than s.

    :param x: (..., P).
    :param scale: s (P,).
    :param factor: W (P, rank).
    :param tril: of ``capacitance_tril`` (rank, rank).
    """
    z, columns = x / scale, factor / scale[:, None]
    projected = (z @ columns).double()[..., None]
    best = torch.cholesky_solve(projected, tril.double())[..., 0].to(z)
    return (z - best @ columns.mT).square().sum(-1) + best.square().sum(-1)

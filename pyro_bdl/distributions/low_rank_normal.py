"""Gaussians whose covariance or precision is diagonal plus low rank."""

from functools import cached_property

import torch
from torch import Tensor

from pyro_bdl.utils.precision import double

_ROWS_AT_ONCE = 2**16  # the rows of a tall matrix that are copied to float64 at once


class DiagonalPlusLowRank:
    """The matrix M = diag(s^2) + W W' = S (1 + F F') S with S = diag(s) and F = S^-1 W.

    Everything follows from the Gram matrix F' F (rank, rank) and K = 1 + F' F = L L', in float64:

        log det M = 2 sum_i log s_i + 2 sum_k log L_kk
        M^-1 = S^-1 (1 - F K^-1 F') S^-1

    M may be a covariance or a precision; the class that uses it says which.

    :param scale: s, (P,), positive.
    :param factor: W, (P, rank).
    """

    def __init__(self, scale: Tensor, factor: Tensor) -> None:
        self.scale, self.factor = scale, factor

    @cached_property
    def columns(self) -> Tensor:
        """F, (P, rank)."""
        return self.factor / self.scale[:, None]

    @cached_property
    def gram(self) -> Tensor:
        """F' F, (rank, rank)."""
        return double(self.columns.mT @ self.columns)

    @cached_property
    def tril(self) -> Tensor:
        """L, (rank, rank)."""
        return torch.linalg.cholesky(double(self.gram) + self._eye())

    def _eye(self) -> Tensor:
        return torch.eye(len(self.gram), dtype=self.gram.dtype, device=self.gram.device)

    def log_det(self) -> Tensor:
        """Return log det M, a scalar."""
        return 2.0 * (self.scale.log().sum() + self.tril.diagonal().log().sum().to(self.scale))

    def diagonal(self) -> Tensor:
        """Return the diagonal of M, (P,)."""
        return self.scale.square() + self.factor.square().sum(-1)

    def inverse_diagonal(self) -> Tensor:
        """Return the diagonal of M^-1, (P,), computed in float64.

        Where rank < P its absolute error is that of float64 relative to s^-2.
        """
        squares = double(self.scale).square()
        size, rank = self.columns.shape
        if size <= rank:
            outer = double(self.columns) @ double(self.columns).mT
            root = torch.linalg.cholesky(outer + torch.eye(size, device="cpu").to(outer))
            return (torch.cholesky_inverse(root).diagonal() / squares).to(self.scale)
        parts = []
        for part in self.columns.split(_ROWS_AT_ONCE):
            inner = torch.linalg.solve_triangular(double(self.tril), double(part).mT, upper=False)
            parts.append(1.0 - inner.square().sum(0))
        return (torch.cat(parts) / squares).to(self.scale)

    def quadratic(self, x: Tensor) -> Tensor:
        """Return x' M x for x (..., P)."""
        z = x * self.scale
        return z.square().sum(-1) + (z @ self.columns).square().sum(-1)

    def inverse_quadratic(self, x: Tensor) -> Tensor:
        """Return x' M^-1 x for x (..., P)."""
        rest, best = self._fitted(x)
        return rest.square().sum(-1) + best.square().sum(-1)

    def inverse_root(self, x: Tensor) -> Tensor:
        """Return Y (..., P + rank) with Y Y' = X M^-1 X' for the rows of X (..., P)."""
        return torch.cat(self._fitted(x), -1)

    def _fitted(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z - F a and a at the minimum of |z - F a|^2 + |a|^2 = x' M^-1 x, with z = S^-1 x.

        The minimum is at a = K^-1 F' z. The value equals Woodbury's |z|^2 - z' F a, but avoids the
        difference of large numbers, which loses all digits if W is much larger than s.
        """
        z = x / self.scale
        best = self._weights(z)
        return z - best @ self.columns.mT, best

    def solve(self, x: Tensor) -> Tensor:
        """Return M^-1 x for x (..., P)."""
        return self._fitted(x)[0] / self.scale

    def _weights(self, z: Tensor) -> Tensor:
        """K^-1 F' z, (..., rank)."""
        projected = double(z @ self.columns)
        columns = projected[None].flatten(0, -2).mT  # no numbers of sizes, for Pyro's Jit ELBOs
        return torch.cholesky_solve(columns, double(self.tril)).mT.reshape_as(projected).to(z)

    def sample(self, num_samples: int) -> Tensor:
        """Return draws (S, P) of N(0, M)."""
        size, rank = self.factor.shape
        like = self.factor
        noise = torch.randn(num_samples, size + rank, dtype=like.dtype, device=like.device)
        own, common = noise.split([size, rank], -1)
        return self.scale * own + common @ self.factor.mT

    def sample_inverse(self, num_samples: int) -> Tensor:
        """Return draws (S, P) of N(0, M^-1): S^-1 (1 + F F')^(-1/2) applied to noise."""
        like = self.factor
        noise = torch.randn(num_samples, len(like), dtype=like.dtype, device=like.device)
        shrunk = (noise @ self.columns) @ self._root.to(noise)
        return (noise - shrunk @ self.columns.mT) / self.scale

    @cached_property
    def _root(self) -> Tensor:
        """The matrix R with (1 + F F')^(-1/2) = 1 - F R F'.

        It is r(g) = (1 - (1 + g)^(-1/2)) / g of the Gram matrix, computed without the difference
        and the quotient, which would lose digits.
        """
        values, vectors = torch.linalg.eigh(double(self.gram))
        roots = (1.0 + values.clamp(min=0.0)).sqrt()
        return (vectors / (roots * (1.0 + roots))) @ vectors.mT


class PrecisionOfLowRankCovariance:
    """The precision M^-1 of N(0, M) with M = diag(s^2) + W W'.

    It has the methods of a ``Precision`` that a density needs.

    :param scale: s (P,).
    :param factor: W (P, rank).
    """

    dense = False

    def __init__(self, scale: Tensor, factor: Tensor) -> None:
        self.covariance, self.size = DiagonalPlusLowRank(scale, factor), len(scale)

    @property
    def independent(self) -> bool:
        """True if M is diagonal."""
        return not self.covariance.factor.shape[-1]

    def logdet(self) -> Tensor:
        """Return log det of the precision, a scalar."""
        return -self.covariance.log_det()

    def quadratic(self, x: Tensor) -> Tensor:
        """Return x' M^-1 x for x (..., P)."""
        return self.covariance.inverse_quadratic(x)

    def sample(self, num_samples: int) -> Tensor:
        """Return draws (S, P)."""
        return self.covariance.sample(num_samples)

    def variances(self) -> Tensor:
        """Return the diagonal of M, (P,)."""
        return self.covariance.diagonal()

    def diagonal(self) -> Tensor:
        """Return the diagonal of the precision, (P,)."""
        return self.covariance.inverse_diagonal()

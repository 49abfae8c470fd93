"""Gaussians with mean zero in R^p given by their precision: the algebra that structures share.

Every precision has

- ``logdet()``: log det of the precision, a scalar;
- ``sample(S)``: draws (S, p);
- ``draw(S)``: draws for what is linear in them, without the vectors where there is a shorter way;
- ``quadratic(x)``: x' precision x for x (..., p);
- ``solve(x)``: precision^-1 x for x (..., p);
- ``variances()``: the marginal variances (p,);
- ``covariance(jacobian)``: J_n C J_n' for every datum, (n, K, K);
- ``output_variances(jacobian)``: the diagonals of these, (n, K);
- ``joint_covariance(jacobian)``: J C J' over all data, (n K, n K), data before columns.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.gram import joint_gram
from pyro_bdl.curvature.jacobian.jacobian import Jacobian
from pyro_bdl.curvature.structures.draws import Drawn, Offsets
from pyro_bdl.utils.linear_algebra import cholesky


class Precision(Protocol):
    """A positive definite matrix as the precision of a Gaussian."""

    size: int

    def logdet(self) -> Tensor: ...

    def sample(self, num_samples: int) -> Tensor: ...

    def draw(self, num_samples: int) -> Offsets: ...

    def quadratic(self, x: Tensor) -> Tensor: ...

    def solve(self, x: Tensor) -> Tensor: ...

    def variances(self) -> Tensor: ...

    def covariance(self, jacobian: Jacobian) -> Tensor: ...

    def output_variances(self, jacobian: Jacobian) -> Tensor: ...

    def joint_covariance(self, jacobian: Jacobian) -> Tensor: ...


def log_prob(precision: Precision, x: Tensor) -> Tensor:
    """log N(x; 0, precision^-1) for x (..., p)."""
    constant = precision.size * math.log(2 * math.pi)
    return 0.5 * (precision.logdet() - precision.quadratic(x) - constant)


class FullPrecision:
    """A dense precision matrix (p, p)."""

    def __init__(self, matrix: Tensor, *, what: str = "the posterior precision") -> None:
        self.size, self.dtype = len(matrix), matrix.dtype
        self.factor = cholesky(matrix, what)

    def logdet(self) -> Tensor:
        return 2.0 * self.factor.diagonal().log().sum().to(self.dtype)

    def sample(self, num_samples: int) -> Tensor:
        like = self.factor
        noise = torch.randn(self.size, num_samples, dtype=like.dtype, device=like.device)
        return torch.linalg.solve_triangular(like.mT, noise, upper=True).mT.to(self.dtype)

    def draw(self, num_samples: int) -> Drawn:
        return Drawn(self.sample(num_samples))

    def quadratic(self, x: Tensor) -> Tensor:
        return (x.to(self.factor) @ self.factor).square().sum(-1).to(self.dtype)

    def solve(self, x: Tensor) -> Tensor:
        columns = x.to(self.factor).reshape(-1, self.size).mT
        return torch.cholesky_solve(columns, self.factor).mT.reshape(x.shape).to(self.dtype)

    def variances(self) -> Tensor:
        return torch.cholesky_inverse(self.factor).diagonal().to(self.dtype)

    def _whitened(self, jacobian: Jacobian) -> Tensor:
        """L^-1 J' as (n, K, p)."""
        rows = jacobian.rows().transpose(0, 1).to(self.factor)
        flat = torch.linalg.solve_triangular(
            self.factor, rows.reshape(-1, self.size).mT, upper=False
        )
        return flat.mT.reshape(rows.shape)

    def covariance(self, jacobian: Jacobian) -> Tensor:
        rows = self._whitened(jacobian)
        return (rows @ rows.mT).to(self.dtype)

    def output_variances(self, jacobian: Jacobian) -> Tensor:
        return self._whitened(jacobian).square().sum(2).to(self.dtype)

    def joint_covariance(self, jacobian: Jacobian) -> Tensor:
        rows = self._whitened(jacobian).flatten(0, 1)
        return (rows @ rows.mT).to(self.dtype)


class DiagonalPrecision:
    """Independent Gaussians with precisions (p,)."""

    def __init__(self, diagonal: Tensor, *, what: str = "the posterior precision") -> None:
        if not (diagonal > 0).all():
            lowest = float(diagonal.min())
            raise ValueError(
                f"{what} is not positive (lowest entry {lowest:.3g}): directions without "
                "curvature need a prior with a finite variance"
            )
        self.diagonal, self.size = diagonal, len(diagonal)

    def logdet(self) -> Tensor:
        return self.diagonal.log().sum()

    def sample(self, num_samples: int) -> Tensor:
        like = self.diagonal
        noise = torch.randn(num_samples, self.size, dtype=like.dtype, device=like.device)
        return noise * like.rsqrt()

    def draw(self, num_samples: int) -> Drawn:
        return Drawn(self.sample(num_samples))

    def quadratic(self, x: Tensor) -> Tensor:
        return (x.square() * self.diagonal).sum(-1)

    def solve(self, x: Tensor) -> Tensor:
        return x / self.diagonal

    def variances(self) -> Tensor:
        return self.diagonal.reciprocal()

    def covariance(self, jacobian: Jacobian) -> Tensor:
        return jacobian.gram(self.variances())

    def output_variances(self, jacobian: Jacobian) -> Tensor:
        return jacobian.norms(self.variances())

    def joint_covariance(self, jacobian: Jacobian) -> Tensor:
        result, variances = jacobian.joint_zeros(), self.variances()
        for block in jacobian.blocks:
            result += joint_gram(block, block.place.spread(variances, block.shape))
        return result

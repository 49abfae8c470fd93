"""The matrix normal distribution MN(M, U, V), with dependent rows and dependent columns.

W = M + A E B' with independent standard normal E, U = A A' (p, p) and V = B B' (q, q). The
covariance of W_ij and W_kl is U_ik V_jl; that of the stacked columns is V kron U (Gupta & Nagar
1999, section 2.2). The factors A and B are lower triangular matrices, or vectors for diagonal ones.
"""

import math
from typing import Any

import torch
from pyro.distributions import TorchDistribution, constraints
from torch import Tensor
from torch.distributions import Independent, Normal, register_kl

from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.utils.precision import double


class MatrixNormal(TorchDistribution):
    """MN(M, A A', B B') over tensors with the shape of M, read as matrices (first axis, other
    axes).

    :param loc: M, of the event shape (p, ...), q numbers in each of p rows.
    :param row_factor: A, (p, p) lower triangular, or (p,) for independent rows.
    :param column_factor: B, (q, q) lower triangular, or (q,) for independent columns.
    """

    arg_constraints: dict[str, Any] = {"loc": constraints.real}  # noqa: RUF012
    has_rsample = True

    def __init__(
        self,
        loc: Tensor,
        row_factor: Tensor,
        column_factor: Tensor,
        validate_args: bool | None = None,
    ) -> None:
        self.loc, self.row_factor, self.column_factor = loc, row_factor, column_factor
        self.rows, self.columns = len(row_factor), len(column_factor)
        if loc.dim() < 1 or (loc.shape[0], loc.shape[1:].numel()) != (self.rows, self.columns):
            raise ValueError(
                f"a mean of shape {tuple(loc.shape)} does not fit {self.rows} rows and "
                f"{self.columns} columns"
            )
        super().__init__(event_shape=loc.shape, validate_args=validate_args)

    @property
    def support(self) -> Any:
        return constraints.independent(constraints.real, len(self.event_shape))

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        rows, columns = variances(self.row_factor), variances(self.column_factor)
        return (rows[:, None] * columns).reshape(self.event_shape)

    def covariance_matrix(self) -> Tensor:
        """The dense covariance of the flattened tensor, (p q, p q): U kron V, rows first."""
        rows, columns = _dense(self.row_factor), _dense(self.column_factor)
        return torch.kron(rows @ rows.mT, columns @ columns.mT)

    def precision_matrix(self) -> Tensor:
        """The inverse of ``covariance_matrix``, (p q, p q)."""
        return torch.kron(_inverse(self.row_factor), _inverse(self.column_factor))

    def log_determinant(self) -> Tensor:
        """log det (U kron V) = q log det U + p log det V, a scalar."""
        rows, columns = _log_det(self.row_factor), _log_det(self.column_factor)
        return 2.0 * (self.columns * rows + self.rows * columns)

    def quadratic(self, x: Tensor) -> Tensor:
        """|A^-1 X B'^-1|^2 for deviations x (..., *event_shape)."""
        batch = x.shape[: x.dim() - len(self.event_shape)]
        matrix = x.reshape(*batch, self.rows, self.columns)
        half = _solved(self.row_factor, matrix)
        return _solved(self.column_factor, half.mT).square().sum((-2, -1))

    def log_prob(self, value: Tensor) -> Tensor:
        constant = self.rows * self.columns * math.log(2 * math.pi)
        return -0.5 * (self.quadratic(value - self.loc) + self.log_determinant() + constant)

    def entropy(self) -> Tensor:
        constant = self.rows * self.columns * (1.0 + math.log(2 * math.pi))
        return 0.5 * (constant + self.log_determinant())

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        shape = torch.Size(sample_shape)
        noise = torch.randn(
            *shape, self.rows, self.columns, dtype=self.loc.dtype, device=self.loc.device
        )
        half = _multiplied(self.row_factor, noise)
        return self.loc + _multiplied(self.column_factor, half.mT).mT.reshape(
            shape + self.event_shape
        )


def variances(factor: Tensor) -> Tensor:
    """The diagonal of A A' for a triangular A (n, n), or a diagonal one (n,)."""
    return factor.square() if factor.dim() == 1 else factor.square().sum(-1)


def _dense(factor: Tensor) -> Tensor:
    return torch.diag(factor) if factor.dim() == 1 else factor


def _inverse(factor: Tensor) -> Tensor:
    """(A A')^-1."""
    if factor.dim() == 1:
        return torch.diag(factor.square().reciprocal())
    return torch.cholesky_inverse(double(factor)).to(factor).contiguous()


def _log_det(factor: Tensor) -> Tensor:
    return (factor if factor.dim() == 1 else factor.diagonal()).log().sum()


def _multiplied(factor: Tensor, matrix: Tensor) -> Tensor:
    return factor[:, None] * matrix if factor.dim() == 1 else factor @ matrix


def _solved(factor: Tensor, matrix: Tensor) -> Tensor:
    """A^-1 matrix."""
    if factor.dim() == 1:
        return matrix / factor[:, None]
    return torch.linalg.solve_triangular(factor, matrix, upper=False)


def _independent_normal(p: Independent, shape: torch.Size) -> Normal:
    base = base_distribution(p, through_masks=False)
    if not isinstance(base, Normal) or p.batch_shape or p.event_shape != shape:
        raise NotImplementedError
    return base


@register_kl(MatrixNormal, Independent)
def _kl_matrix_normal_normal(q: MatrixNormal, p: Independent) -> Tensor:
    """KL to Normal(n, t^2): 1/2 sum_ij [(U_ii V_jj + (m - n)^2) / t^2 + log t^2 - 1] - 1/2 log det
    (U kron V)."""
    normal = _independent_normal(p, q.event_shape)
    ratio = (q.variance + (q.loc - normal.loc).square()) / normal.scale.square()
    terms = ratio + 2.0 * normal.scale.log() - 1.0
    return 0.5 * (terms.sum() - q.log_determinant())


@register_kl(Independent, MatrixNormal)
def _kl_normal_matrix_normal(q: Independent, p: MatrixNormal) -> Tensor:
    """KL of Normal(m, s^2): ``_gaussian_kl`` with the trace sum_ij (U^-1)_ii (V^-1)_jj s_ij^2."""
    normal = _independent_normal(q, p.event_shape)
    rows, columns = (_inverse(f).diagonal() for f in (p.row_factor, p.column_factor))
    square = normal.scale.square().reshape(p.rows, p.columns)
    trace = (rows[:, None] * columns * square).sum()
    return _gaussian_kl(trace, normal.loc, 2.0 * normal.scale.log().sum(), p)


@register_kl(MatrixNormal, MatrixNormal)
def _kl_matrix_normals(q: MatrixNormal, p: MatrixNormal) -> Tensor:
    """KL of two matrix normals: ``_gaussian_kl`` with the trace tr(U_p^-1 U_q) tr(V_p^-1 V_q)."""
    rows = _solved(p.row_factor, _dense(q.row_factor)).square().sum()
    columns = _solved(p.column_factor, _dense(q.column_factor)).square().sum()
    return _gaussian_kl(rows * columns, q.loc, q.log_determinant(), p)


def _gaussian_kl(trace: Tensor, loc: Tensor, log_det: Tensor, p: MatrixNormal) -> Tensor:
    """1/2 [tr(P^-1 Q) + (m - n)' P^-1 (m - n) - pq + log det P - log det Q] for covariances P and
    Q."""
    quadratic, numbers = p.quadratic(loc - p.loc), p.rows * p.columns
    return 0.5 * (trace + quadratic - numbers + p.log_determinant() - log_det)

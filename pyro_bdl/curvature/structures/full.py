"""Full curvature: sum_n J_n' J_n as a matrix."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.jacobian import Jacobian
from pyro_bdl.curvature.jacobian.output_layers import SoftmaxBlock
from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.curvature.structures.base import Curvature, Precision, StructureOptions
from pyro_bdl.program.subset import Subset
from pyro_bdl.utils.linear_algebra import add_products, cholesky, products

_EIGENVALUES_UP_TO = 2048  # latents
_ROUNDING = 1e-6  # of eigenvalues, relative to the largest


class FullCurvature(Curvature):
    """The matrix sum_n J_n' J_n, (p, p)."""

    takes_hessian = takes_softmax = True
    matrix: Tensor

    def __init__(self, size: int, like: Tensor) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("matrix", like.new_zeros(size, size))

    @classmethod
    def empty(
        cls, subset: Subset, like: Tensor, options: StructureOptions, before: Self | None
    ) -> Self:
        return cls(subset.size, like)

    @classmethod
    def from_matrix(cls, matrix: Tensor) -> Self:
        result = cls(0, matrix)
        result.size, result.matrix = len(matrix), matrix
        return result

    @classmethod
    def memory(cls, size: int, options: StructureOptions, num_rows: int = 0) -> int:
        return 3 * size * size

    def add(self, jacobian: Jacobian) -> None:
        classes = [block for block in jacobian.blocks if isinstance(block, SoftmaxBlock)]
        if classes:
            assert len(classes) == len(jacobian.blocks)
            self._add_classes(classes)
            return
        covered = sum(block.position.size for block in jacobian.blocks)
        if 2 * covered < self.size:
            positions = [
                block.position.index_tensor(self.matrix.device) for block in jacobian.blocks
            ]
            if positions:
                where = torch.cat(positions)
                rows = torch.cat([block.rows() for block in jacobian.blocks], -1).flatten(0, 1)
                self.matrix[where[:, None], where] += products(rows)
            return
        add_products(self.matrix, jacobian.rows().flatten(0, 1))

    def _add_classes(self, blocks: list[SoftmaxBlock]) -> None:
        """Add the sums over the data of w (diag(p) - p p') kron a a', with a the inputs of all
        blocks.

        This takes a product for each pair of classes; rows would cost more by a factor of the
        number of classes.
        """
        p, w = blocks[0].gradients[0, :, 0, 0], blocks[0].weights
        ones = p.new_ones(len(p), 1)
        a = torch.cat([ones if b.source is None else b.source()[:, 0, 0] for b in blocks], 1)
        device, classes = self.matrix.device, p.shape[1]
        where = torch.cat([b.position.index_tensor(device).view(classes, -1) for b in blocks], 1)
        for k in range(classes):
            weights = -w * p[:, k : k + 1] * p[:, : k + 1]
            others = p[:, :k].sum(1) + p[:, k + 1 :].sum(1)  # 1 - p_k, which would round to zero
            weights[:, k] = w[:, 0] * p[:, k] * others
            found = a.mT @ (weights[:, :, None] * a[:, None]).flatten(1)  # (H, (k + 1) H)
            columns = where[: k + 1].flatten()
            self.matrix[where[k][:, None], columns] += found
            earlier = columns[: k * a.shape[1]]
            self.matrix[earlier[:, None], where[k]] += found[:, : len(earlier)].mT

    def sums(self) -> list[Tensor]:
        return [self.matrix]

    def scale(self, factor: float) -> None:
        self.matrix *= factor

    def merge(self, other: Self) -> None:
        self.matrix += other.matrix

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal()

    def spectra(self, groups: Sequence[Mapping[str, slice]]) -> list[Tensor] | None:
        if len(groups) > 1 or self.size > _EIGENVALUES_UP_TO:
            return None
        values = torch.linalg.eigvalsh(self.matrix.double())
        is_psd = bool(values[0] >= -_ROUNDING * values[-1].abs())  # a Hessian may be indefinite
        return [values.clamp(min=0.0).to(self.matrix)] if is_psd else None

    def with_prior(self, prior: PriorPrecision, factor: Tensor | float = 1.0) -> "FullPrecision":
        return FullPrecision(prior.added_to(self.matrix * factor))


class FullPrecision(Precision):
    """A dense precision matrix (p, p), stored as its Cholesky factor."""

    dense = True

    def __init__(self, matrix: Tensor, *, what: str = "the posterior precision") -> None:
        self.size, self.dtype = len(matrix), matrix.dtype
        self.factor = cholesky(matrix, what)
        self._matrix = matrix if matrix.requires_grad else None

    def logdet(self) -> Tensor:
        if self._matrix is None:
            return _log_determinant(self.factor).to(self.dtype)
        found: Tensor = _LogDeterminant.apply(self._matrix, self.factor)
        return found

    def sample(self, num_samples: int) -> Tensor:
        like = self.factor
        noise = torch.randn(self.size, num_samples, dtype=like.dtype, device=like.device)
        return torch.linalg.solve_triangular(like.mT, noise, upper=True).mT.to(self.dtype)

    def quadratic(self, x: Tensor) -> Tensor:
        return (x.to(self.factor) @ self.factor).square().sum(-1).to(self.dtype)

    def solve(self, x: Tensor) -> Tensor:
        columns = x.to(self.factor).reshape(-1, self.size).mT
        return torch.cholesky_solve(columns, self.factor).mT.reshape(x.shape).to(self.dtype)

    def variances(self) -> Tensor:
        return torch.cholesky_inverse(self.factor).diagonal().to(self.dtype)

    def _whitened(self, jacobian: Jacobian) -> Tensor:
        """Return L^-1 J' as (n, K, p)."""
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


def _log_determinant(factor: Tensor) -> Tensor:
    return 2.0 * factor.diagonal().log().sum()


class _LogDeterminant(torch.autograd.Function):
    """log det A, with d log det A / dA = A^-1, which costs a quarter of Cholesky's derivative."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return _log_determinant(factor).to(matrix.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple:  # type: ignore[override]
        (factor,) = ctx.saved_tensors
        return upstream * torch.cholesky_inverse(factor).to(upstream), None

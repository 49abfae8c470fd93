"""Full curvature: sum_n J_n' J_n as a matrix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.jacobian import (
    Block,
    DenseBlock,
    Jacobian,
    ProductBlock,
    SoftmaxBlock,
)
from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.curvature.structures.base import (
    Curvature,
    Precision,
    Structure,
    Whitened,
    beside,
    named,
    whole_rows,
)
from pyro_bdl.program.subset import Subset
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.linear_algebra import add_products, cholesky, products, widened
from pyro_bdl.utils.precision import double

_EIGENVALUES_UP_TO = 2048  # latents
_ROUNDING = 1e-6  # of eigenvalues, relative to the largest


class FullCurvature(Curvature):
    """The matrix sum_n J_n' J_n, (p, p), in float64 up to 4096 latents."""

    takes_hessian = takes_softmax = True
    per_column = "entries"
    matrix: Tensor

    def __init__(self, subset: Subset, like: Tensor) -> None:
        super().__init__()
        self.size = size = subset.size
        self.register_buffer("matrix", widened(like, size).new_zeros(size, size))

    def add(self, jacobian: Jacobian) -> None:
        if jacobian.num_columns > 1 and all(_is_product(block) for block in jacobian.blocks):
            self._add_layers(_layers(jacobian.blocks, self.matrix))
            return
        for column in range(jacobian.num_columns):
            self._add_rows([_column(block, column) for block in jacobian.blocks], jacobian)

    def _add_rows(self, blocks: list[Block], jacobian: Jacobian) -> None:
        if 2 * sum(block.position.size for block in blocks) >= self.size:
            rows = replace(jacobian, blocks=blocks, num_columns=1).rows()
            add_products(self.matrix, rows.flatten(0, 1).to(self.matrix))
        elif blocks:
            where = torch.cat([b.position.index_tensor(self.matrix.device) for b in blocks])
            rows = torch.cat([block.rows() for block in blocks], -1).flatten(0, 1)
            self.matrix[where[:, None], where] += products(rows.to(self.matrix))

    def _add_layers(self, layers: list["_Layer"]) -> None:
        """Add the sums over the data of (sum over the columns of g h') kron a b', for every pair of
        layers with gradients g, h and inputs a, b.

        This takes a product for each output; rows would cost more by a factor of the number of
        columns.
        """
        for number, layer in enumerate(layers):
            for other in layers[: number + 1]:
                for k in range(len(layer.where)):
                    count = k + 1 if other is layer else len(other.where)  # the rest by symmetry
                    moments = layer.moments(k, other)[:, :count, None]
                    found = layer.inputs.mT @ (moments * other.inputs[:, None]).flatten(1)
                    columns = other.where[:count].flatten()
                    self.matrix[layer.where[k][:, None], columns] += found
                    mirrored = columns[: k * other.inputs.shape[1]] if other is layer else columns
                    self.matrix[mirrored[:, None], layer.where[k]] += found[:, : len(mirrored)].mT

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal()

    def spectra(self, groups: Sequence[Mapping[str, slice]]) -> list[Tensor] | None:
        if len(groups) > 1 or self.size > _EIGENVALUES_UP_TO:
            return None
        values = torch.linalg.eigvalsh(double(self.matrix))
        is_psd = bool(values[0] >= -_ROUNDING * values[-1].abs())  # a Hessian may be indefinite
        return [values.clamp(min=0.0).to(self.matrix)] if is_psd else None

    def with_prior(self, prior: PriorPrecision, factor: Tensor | float = 1.0) -> "FullPrecision":
        matrix = prior.added_to(self.matrix * beside(factor, self.matrix))
        return FullPrecision(matrix, like=prior.diagonal)


@dataclass(frozen=True)
class Full(Structure):
    """``structure="full"``: the whole matrix."""

    papers: ClassVar[tuple[str, ...]] = (bibliography.LAPLACE,)
    name: str = named("full")
    curvature: ClassVar = FullCurvature

    def memory(self, size: int, like: Tensor, num_rows: int = 0) -> int:
        return 3 * size**2 * widened(like, size).element_size()


@dataclass
class _Layer:
    """The weights and biases of one product, with the same gradients in its outputs.

    :param block: of these.
    :param inputs: of all, one for a bias, (n, H).
    :param where: their positions in the subset, (out, H).
    """

    block: ProductBlock
    inputs: Tensor
    where: Tensor

    @cached_property
    def gradients(self) -> Tensor:
        """(K, n, out)"""
        return self.block.gradients[:, :, 0, 0].to(self.inputs)

    def moments(self, k: int, other: "_Layer") -> Tensor:
        """The sums over the columns of this layer's k-th gradient times the other's, (n, out)."""
        if not isinstance(self.block, SoftmaxBlock):
            return torch.einsum("kn,kno->no", self.gradients[:, :, k], other.gradients)
        p, w = self.gradients[0], self.block.weights.to(self.inputs)
        found = -w * p[:, k : k + 1] * p
        found[:, k] = w[:, 0] * p[:, k] * (p.sum(1) - p[:, k])
        return found


def _is_product(block: Block) -> bool:
    """Return whether each datum has a single product of whole rows of a weight."""
    if isinstance(block, SoftmaxBlock):
        return True
    return isinstance(block, ProductBlock) and block.gradients.shape[2:4] == (1, 1)


def _layers(blocks: Sequence[Any], like: Tensor) -> list[_Layer]:
    groups: dict[int, list[ProductBlock]] = {}
    for block in blocks:
        groups.setdefault(id(block.gradients), []).append(block)
    layers = []
    for members in groups.values():
        ones = like.new_ones(members[0].gradients.shape[1], 1)
        a = [ones if b.source is None else b.source()[:, 0, 0].to(like) for b in members]
        out = members[0].gradients.shape[-1]
        where = [b.position.index_tensor(like.device).view(out, -1) for b in members]
        layers.append(_Layer(members[0], torch.cat(a, 1), torch.cat(where, 1)))
    return layers


def _column(block: Block, number: int) -> Block:
    part = slice(number, number + 1)
    if isinstance(block, DenseBlock):
        return replace(block, values=block.values[part])
    return replace(block, gradients=block.gradients[part])


class FullPrecision(Precision):
    """A dense precision matrix (p, p), stored as its Cholesky factor.

    :param like: a tensor of the dtype and device of the results; by default the matrix.
    """

    dense = True

    def __init__(self, matrix: Tensor, *, like: Tensor | None = None) -> None:
        self.size, self._like = len(matrix), matrix.new_empty(0) if like is None else like
        self.factor = cholesky(matrix, "the posterior precision")
        self._matrix = matrix if matrix.requires_grad else None

    def logdet(self) -> Tensor:
        if self._matrix is None:
            return _log_determinant(self.factor).to(self._like)
        found: Tensor = _LogDeterminant.apply(self._matrix, self.factor)
        return found.to(self._like)

    def sample(self, num_samples: int) -> Tensor:
        like = self.factor
        noise = torch.randn(self.size, num_samples, dtype=like.dtype, device=like.device)
        return torch.linalg.solve_triangular(like.mT, noise, upper=True).mT.to(self._like)

    def quadratic(self, x: Tensor) -> Tensor:
        return (x.to(self.factor) @ self.factor).square().sum(-1).to(self._like)

    def solve(self, x: Tensor) -> Tensor:
        columns = x.to(self.factor).reshape(-1, self.size).mT
        return torch.cholesky_solve(columns, self.factor).mT.reshape(x.shape).to(self._like)

    def variances(self) -> Tensor:
        return torch.cholesky_inverse(self.factor).diagonal().to(self._like)

    def whitened(self, jacobian: Jacobian) -> list[Whitened]:
        columns = jacobian.rows().to(self.factor).flatten(0, 1).mT
        rows = torch.linalg.solve_triangular(self.factor, columns, upper=False).mT
        return [whole_rows(jacobian, rows.unflatten(0, (jacobian.num_columns, -1)))]


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

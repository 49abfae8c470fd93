"""The curvature as the rows that it is the sum of: the exact posterior in function space.

The curvature is W W' with W' (R, p) the Jacobian of all data's outputs, weighted by a root of their
Fisher information; R = N K for N data with K outputs. With the prior precision Lambda = R_0 R_0'
and F = R_0^-1 W, the posterior precision is R_0 (1 + F F') R_0', so that its determinant, solves
and draws follow from the tangent kernel F' F (R, R):

    C = Lambda^-1 - Lambda^-1 W (1 + W' Lambda^-1 W)^-1 W' Lambda^-1

This is cheaper than a matrix (p, p) if R is smaller than p (Khan et al. 2019; Immer et al. 2021,
section 3.3).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.jacobian import Jacobian
from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.curvature.structures.base import (
    Curvature,
    Precision,
    Structure,
    Whitened,
    beside,
    named,
    resize_buffers,
    whole_rows,
)
from pyro_bdl.curvature.structures.full import FullPrecision
from pyro_bdl.distributions.low_rank_normal import DiagonalPlusLowRank
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.subset import Subset
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.precision import double, double_device


class KernelCurvature(Curvature):
    """The rows W', (R, p)."""

    rows: Tensor

    def __init__(self, subset: Subset, like: Tensor) -> None:
        super().__init__()
        self.size, self.parts = subset.size, dict(subset.parts)
        self.register_buffer("rows", like.new_zeros(0, subset.size))
        self._found: list[Tensor] = []
        self._kernels: tuple[Tensor, dict[str, Tensor]] | None = None

    def add(self, jacobian: Jacobian) -> None:
        self._found.append(jacobian.rows().flatten(0, 1))

    def sums(self) -> list[Tensor]:
        raise UnsupportedProgramError(
            'structure="kernel" holds the rows of all data in one process: pass the data '
            'themselves instead of a Shard, or use structure="full" or "kron"'
        )

    def scale(self, factor: float) -> None:
        self.rows = torch.cat([self.rows, *self._found]) * factor**0.5
        self._found = []

    def merge(self, other: Self) -> None:
        self.rows = torch.cat([self.rows, other.rows])

    def diagonal(self) -> Tensor:
        return self.rows.square().sum(0)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        resize_buffers(self, ("rows",), state, prefix, self.rows)
        super()._load_from_state_dict(state, prefix, *rest)

    def with_prior(self, prior: PriorPrecision, factor: Tensor | float = 1.0) -> Precision:
        """Return factor times this curvature, plus the prior's; as a matrix (p, p) if R >= p."""
        if len(self.rows) >= self.size:
            rows = double(self.rows)
            matrix = prior.added_to(rows.mT @ rows * beside(factor, rows))
            return FullPrecision(matrix, like=prior.diagonal)
        root = prior.root(self.parts, 'structure="kernel"')
        gram = None
        if root.indices is None and prior.uniform.keys() >= self.parts.keys():
            gram = self._kernel(prior.uniform)
            gram = gram * beside(factor, gram)
        return KernelPrecision(self.rows, factor, root, gram, like=prior.diagonal)

    def _kernel(self, precisions: Mapping[str, Tensor]) -> Tensor:
        """W' Lambda^-1 W (R, R) under one precision a site, from the kernels of the sites.

        These are computed once: a step on the evidence then costs nothing that grows with p.
        """
        if self._kernels is None or self._kernels[0] is not self.rows:
            with torch.no_grad():
                found = {name: _gram(self.rows[:, part]) for name, part in self.parts.items()}
            self._kernels = self.rows, found
        total = double(self.rows.new_zeros(len(self.rows), len(self.rows)))
        for name, kernel in self._kernels[1].items():
            total = total + kernel / double(precisions[name])
        return total


@dataclass(frozen=True)
class Kernel(Structure):
    """``structure="kernel"``: the posterior of "full" from the N K rows of the data's Jacobians.

    It needs a prior of finite variance, and is cheaper than a matrix where N K is below p.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.KERNEL, bibliography.LINEARIZED)
    name: str = named("kernel")
    curvature: ClassVar = KernelCurvature

    def memory(self, size: int, like: Tensor, num_rows: int = 0) -> int:
        item = double(like).element_size()
        return num_rows * size * (like.element_size() + 3 * item) + 6 * num_rows**2 * item


class KernelPrecision(Precision):
    """The precision R_0 (1 + F F') R_0' with F = R_0^-1 W sqrt(factor), in float64.

    :param rows: W', (R, p).
    :param factor: a factor of W W'.
    :param root: R_0.
    :param gram: F' F, (R, R), where it is known.
    :param like: a tensor of the dtype and device of the results.
    """

    def __init__(
        self,
        rows: Tensor,
        factor: Tensor | float,
        root: PriorPrecision,
        gram: Tensor | None = None,
        *,
        like: Tensor,
    ) -> None:
        self.size, self._like, self.root = rows.shape[1], like, root
        weight = torch.as_tensor(factor, dtype=torch.float64, device=double_device(rows.device))
        self.matrix = _WhitenedRows(rows, weight, root, gram)

    def logdet(self) -> Tensor:
        return (self.root.log_det() + self.matrix.log_det()).to(self._like)

    def sample(self, num_samples: int) -> Tensor:
        return self.root.solve_transposed(self.matrix.sample_inverse(num_samples)).to(self._like)

    def quadratic(self, x: Tensor) -> Tensor:
        return self.matrix.quadratic(self.root.rmatvec(double(x))).to(self._like)

    def solve(self, x: Tensor) -> Tensor:
        inner = self.matrix.solve(self.root.solve(double(x)))
        return self.root.solve_transposed(inner).to(self._like)

    def variances(self) -> Tensor:
        root, indices = self.root, self.root.indices
        found = self.matrix.inverse_diagonal() / root.diagonal.square()
        if indices is not None:
            units = root.diagonal.new_zeros(len(indices), self.size)
            inside = self.matrix.inverse_root(root.solve(units.scatter_(1, indices[:, None], 1.0)))
            found = found.index_copy(0, indices, inside.square().sum(-1))
        return found.to(self._like)

    def whitened(self, jacobian: Jacobian) -> list[Whitened]:
        rows = self.root.solve(double(jacobian.rows()))
        return [whole_rows(jacobian, self.matrix.inverse_root(rows))]


class _WhitenedRows(DiagonalPlusLowRank):
    """The matrix 1 + F F', whose factor F is made when it is asked for: its determinant needs only
    the Gram matrix, which may be known."""

    def __init__(
        self, rows: Tensor, factor: Tensor, root: PriorPrecision, gram: Tensor | None
    ) -> None:
        self.scale = torch.ones_like(root.diagonal)
        self._rows, self._weight, self._prior, self._known = rows, factor, root, gram

    @cached_property
    def factor(self) -> Tensor:  # type: ignore[override]
        return self._prior.solve(double(self._rows)).mul(self._weight.sqrt()).mT

    @cached_property
    def columns(self) -> Tensor:
        return self.factor

    @cached_property
    def gram(self) -> Tensor:
        return self.columns.mT @ self.columns if self._known is None else self._known


def _gram(rows: Tensor) -> Tensor:
    """Return rows rows', (R, R), in float64."""
    rows = double(rows)
    return rows @ rows.mT

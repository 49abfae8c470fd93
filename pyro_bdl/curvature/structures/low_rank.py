"""Low-rank curvature: the leading eigenpairs of sum_n J_n' J_n, without forming it.

Randomized subspace iteration (Halko, Martinsson & Tropp 2011, algorithm 4.4) over products with
the matrix; each pass over the data multiplies the p x (rank + oversampling) basis once.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.jacobian import Jacobian
from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.curvature.structures.base import Curvature, Structure, named
from pyro_bdl.curvature.structures.kernel import KernelPrecision
from pyro_bdl.program.subset import Subset
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.validation import whole_number

_OVERSAMPLING = 10
_ITERATIONS = 2


class LowRankCurvature(Curvature):
    """The matrix U diag(values) U' of the k leading eigenpairs, in float64.

    :param rank: k.
    :param before: a curvature of earlier data, which every pass includes.
    """

    passes, needs_earlier = 1 + _ITERATIONS, True
    vectors: Tensor
    values: Tensor

    def __init__(
        self, subset: Subset, like: Tensor, *, rank: int, before: Self | None = None
    ) -> None:
        super().__init__()
        size, self.parts = subset.size, subset.parts
        self.size, self.rank = size, min(rank, size)
        like = double(like)
        self.register_buffer("vectors", like.new_zeros(size, self.rank))
        self.register_buffer("values", like.new_zeros(self.rank))
        width = min(size, self.rank + _OVERSAMPLING)
        generator = torch.Generator().manual_seed(0)
        draws = torch.randn(size, width, generator=generator, dtype=torch.float32, device="cpu")
        self._basis = _orthonormal(draws.to(like))
        self._product = torch.zeros_like(self._basis)
        self._factor = 1.0
        self._before = before

    def start_pass(self, number: int) -> None:
        if number:
            self._basis = _orthonormal(self._total())
        self._product = torch.zeros_like(self._basis)

    def add(self, jacobian: Jacobian) -> None:
        rows = jacobian.rows().flatten(0, 1).to(self._basis)
        self._product.addmm_(rows.mT, rows @ self._basis)

    def _total(self) -> Tensor:
        """Return the matrix times the basis, including earlier curvature."""
        product = self._product * self._factor
        if self._before is not None:
            before = self._before
            product += before.vectors @ (before.values[:, None] * (before.vectors.mT @ self._basis))
        return product

    def sums(self) -> list[Tensor]:
        return [self._product]

    def scale(self, factor: float) -> None:
        self._factor = factor

    def finish(self, before: Self | None) -> Self:
        """Take the eigenpairs of the matrix in the span of the basis (Rayleigh-Ritz)."""
        projected = self._basis.mT @ self._total()
        values, vectors = torch.linalg.eigh(0.5 * (projected + projected.mT))
        leading = slice(-self.rank, None)
        self.values = values[leading].flip(0).clamp(min=0.0)
        self.vectors = self._basis @ vectors[:, leading].flip(1)
        self._basis = self._product = self.vectors.new_empty(0, 0)
        self._before = None
        return self

    def diagonal(self) -> Tensor:
        return (self.vectors.square() * self.values).sum(-1)

    def with_prior(self, prior: PriorPrecision, factor: Tensor | float = 1.0) -> KernelPrecision:
        """Return factor times this curvature, plus the prior."""
        root = prior.root(self.parts, 'structure="low_rank"')
        rows = (self.vectors * self.values.sqrt()).mT
        return KernelPrecision(rows, factor, root, like=prior.diagonal)


@dataclass(frozen=True)
class LowRank(Structure):
    """``structure="low_rank"``: the leading eigenpairs.

    :param rank: their number.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.RANDOMIZED_SVD,)
    rank: int = 50
    name: str = named("low_rank")
    curvature: ClassVar = LowRankCurvature

    def __post_init__(self) -> None:
        whole_number(self.rank, "rank")

    def memory(self, size: int, like: Tensor, num_rows: int = 0) -> int:
        return 5 * (self.rank + _OVERSAMPLING) * size * double(like).element_size()


def _orthonormal(matrix: Tensor) -> Tensor:
    return torch.linalg.qr(matrix)[0]

"""Diagonal curvature: the diagonal of sum_n J_n' J_n."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.jacobian import Jacobian
from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.curvature.structures.base import Curvature, Precision, Structure, Whitened, named
from pyro_bdl.program.subset import Subset
from pyro_bdl.utils import bibliography


class DiagonalCurvature(Curvature):
    """The diagonal of sum_n J_n' J_n, (p,)."""

    takes_softmax = True
    makes = "entries"
    values: Tensor

    def __init__(self, subset: Subset, like: Tensor) -> None:
        super().__init__()
        self.size = subset.size
        self.register_buffer("values", like.new_zeros(subset.size))

    def add(self, jacobian: Jacobian) -> None:
        for block in jacobian.blocks:
            self.values[block.position.indices] += block.squares().flatten()

    def diagonal(self) -> Tensor:
        return self.values

    def spectra(self, groups: Sequence[Mapping[str, slice]]) -> list[Tensor]:
        return [torch.cat([self.values[part] for part in group.values()]) for group in groups]

    def with_prior(
        self, prior: PriorPrecision, factor: Tensor | float = 1.0
    ) -> "DiagonalPrecision":
        return DiagonalPrecision(self.values * factor + prior.diagonal)


@dataclass(frozen=True)
class Diagonal(Structure):
    """``structure="diag"``: independent latents."""

    papers: ClassVar[tuple[str, ...]] = (bibliography.DIAGONAL,)
    name: str = named("diag")
    curvature: ClassVar = DiagonalCurvature

    def memory(self, size: int, like: Tensor, num_rows: int = 0) -> int:
        return 20 * size * like.element_size()


class DiagonalPrecision(Precision):
    """The precisions (p,) of independent Gaussians.

    :raises ValueError: if a precision is not positive.
    """

    independent = True

    def __init__(self, diagonal: Tensor) -> None:
        check_positive(diagonal)
        self.diagonal, self.size = diagonal, len(diagonal)

    def logdet(self) -> Tensor:
        return self.diagonal.log().sum()

    def sample(self, num_samples: int) -> Tensor:
        like = self.diagonal
        noise = torch.randn(num_samples, self.size, dtype=like.dtype, device=like.device)
        return noise * like.rsqrt()

    def quadratic(self, x: Tensor) -> Tensor:
        return (x.square() * self.diagonal).sum(-1)

    def solve(self, x: Tensor) -> Tensor:
        return x / self.diagonal

    def variances(self) -> Tensor:
        return self.diagonal.reciprocal()

    def whitened(self, jacobian: Jacobian) -> Iterator[Whitened]:
        variances = self.variances()
        for block in jacobian.blocks:
            yield block, block.position.spread(variances, block.shape)


def check_positive(diagonal: Tensor, of: str = "") -> None:
    """Check that precisions are positive.

    :param of: what they are the precisions of, for the message.
    :raises ValueError: if one is not.
    """
    if not (diagonal > 0).all():
        raise ValueError(
            f"the posterior precision{of} is not positive (lowest entry {diagonal.min():.3g}): "
            "directions without curvature need a prior with a finite variance"
        )

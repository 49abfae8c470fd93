"""Full and diagonal curvature: sum_n J_n' J_n as a matrix, or only its diagonal."""

import torch
from torch import Tensor, nn

from pyro_bdl.curvature.jacobian.jacobian import Jacobian
from pyro_bdl.curvature.jacobian.output_layers import SoftmaxProduct
from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.curvature.structures.precision import DiagonalPrecision, FullPrecision
from pyro_bdl.utils.linear_algebra import add_products, products


class FullCurvature(nn.Module):
    """The matrix sum_n J_n' J_n, (p, p)."""

    passes = 1
    matrix: Tensor

    def __init__(self, size: int, like: Tensor) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("matrix", like.new_zeros(size, size))

    def add(self, jacobian: Jacobian) -> None:
        classes = [block for block in jacobian.blocks if isinstance(block, SoftmaxProduct)]
        if classes:
            assert len(classes) == len(jacobian.blocks)
            self._add_classes(classes)
            return
        covered = sum(block.place.size for block in jacobian.blocks)
        if 2 * covered < self.size:
            positions = [block.place.numbers(self.matrix.device) for block in jacobian.blocks]
            if positions:
                where = torch.cat(positions)
                rows = torch.cat([block.rows() for block in jacobian.blocks], -1).flatten(0, 1)
                self.matrix[where[:, None], where] += products(rows)
            return
        add_products(self.matrix, jacobian.rows().flatten(0, 1))

    def _add_classes(self, blocks: list[SoftmaxProduct]) -> None:
        """Sums over the data of w (diag(p) - p p') x a a', a the inputs of all blocks: as many
        products as there are pairs of classes, where the columns' rows would take more by the
        number of classes."""
        p, w = blocks[0].gradients[0, :, 0, 0], blocks[0].weights
        ones = p.new_ones(len(p), 1)
        a = torch.cat([ones if b.source is None else b.source()[:, 0, 0] for b in blocks], 1)
        device, classes = self.matrix.device, p.shape[1]
        where = torch.cat([b.place.numbers(device).view(classes, -1) for b in blocks], 1)
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
        """What a pass has added up, to be added to in place."""
        return [self.matrix]

    def scale(self, factor: float) -> None:
        self.matrix *= factor

    def merge(self, other: "FullCurvature") -> None:
        self.matrix += other.matrix

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal()

    def with_prior(self, prior: PriorPrecision, factor: Tensor | float = 1.0) -> FullPrecision:
        """factor times this curvature, plus the prior's."""
        return FullPrecision(prior.added_to(self.matrix * factor))


class DiagonalCurvature(nn.Module):
    """The diagonal of sum_n J_n' J_n, (p,)."""

    passes = 1
    values: Tensor

    def __init__(self, size: int, like: Tensor) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("values", like.new_zeros(size))

    def add(self, jacobian: Jacobian) -> None:
        for block in jacobian.blocks:
            self.values[block.place.positions] += block.place.take(block.squares().flatten())

    def sums(self) -> list[Tensor]:
        """What a pass has added up, to be added to in place."""
        return [self.values]

    def scale(self, factor: float) -> None:
        self.values *= factor

    def merge(self, other: "DiagonalCurvature") -> None:
        self.values += other.values

    def diagonal(self) -> Tensor:
        return self.values

    def with_prior(self, prior: PriorPrecision, factor: Tensor | float = 1.0) -> DiagonalPrecision:
        """factor times this curvature, plus the prior's."""
        return DiagonalPrecision(self.values * factor + prior.diagonal)

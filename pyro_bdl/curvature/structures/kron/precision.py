"""The posterior precision of Kronecker-factored curvature: independent blocks and their algebra."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.block_position import BlockPosition
from pyro_bdl.curvature.jacobian.jacobian import Block, DenseBlock, Jacobian, same_entries
from pyro_bdl.curvature.structures.base import Precision
from pyro_bdl.curvature.structures.kron.eigen_precision import EigenPrecision


class KroneckerPrecision(Precision):
    """Independent blocks, each with its own precision.

    :param blocks: the position and precision of each block; together they cover all p numbers.
    """

    def __init__(self, size: int, blocks: list[tuple[BlockPosition, Any]], like: Tensor) -> None:
        self.size, self.blocks, self.like = size, blocks, like
        self._by_key = {position.key: number for number, (position, _) in enumerate(blocks)}

    def logdet(self) -> Tensor:
        return torch.stack([precision.logdet() for _, precision in self.blocks]).sum()

    def sample(self, num_samples: int) -> Tensor:
        result = self.like.new_empty(num_samples, self.size)
        for position, precision in self.blocks:
            result[:, position.indices] = precision.sample(num_samples)
        return result

    def draw(self, num_samples: int) -> "KroneckerDraws":
        return KroneckerDraws(self, num_samples)

    def quadratic(self, x: Tensor) -> Tensor:
        terms = [
            precision.quadratic(x[..., position.indices]) for position, precision in self.blocks
        ]
        return torch.stack(terms).sum(0)

    def solve(self, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        for position, precision in self.blocks:
            result[..., position.indices] = precision.solve(x[..., position.indices])
        return result

    def variances(self) -> Tensor:
        result = self.like.new_zeros(self.size)
        for position, precision in self.blocks:
            values = precision.variances()
            result = result.index_put((position.index_tensor(result.device),), values)
        return result

    def weighted_trace(self, weights: Tensor) -> Tensor:
        terms = [
            precision.weighted_trace(weights[position.indices])
            for position, precision in self.blocks
        ]
        return torch.stack([term.to(self.like) for term in terms]).sum()

    def covariance(self, jacobian: Jacobian) -> Tensor:
        n, columns = jacobian.num_data, jacobian.num_columns
        result = jacobian.like.new_zeros(n, columns, columns)
        for number, block in self.touched_blocks(jacobian):
            result += self.blocks[number][1].covariance(block)
        return result

    def output_variances(self, jacobian: Jacobian) -> Tensor:
        result = jacobian.like.new_zeros(jacobian.num_data, jacobian.num_columns)
        for number, block in self.touched_blocks(jacobian):
            result += self.blocks[number][1].output_variances(block)
        return result

    def joint_covariance(self, jacobian: Jacobian) -> Tensor:
        result = jacobian.joint_zeros()
        for number, block in self.touched_blocks(jacobian):
            result += self.blocks[number][1].joint_covariance(block)
        return result

    def touched_blocks(self, jacobian: Jacobian) -> Iterator[tuple[int, Any]]:
        """Yield the number of every block that the Jacobian affects, and the Jacobian restricted to
        it.

        The restriction is a block of the Jacobian for Kronecker factors, else a separate Jacobian.
        """
        for number, block in self._blocks(jacobian):
            is_product = isinstance(self.blocks[number][1], EigenPrecision)
            yield number, block if is_product else _alone(block, jacobian)

    def _blocks(self, jacobian: Jacobian) -> Iterator[tuple[int, Block]]:
        """Yield the same with Jacobian blocks only, as rows if the latents differ."""
        others: list[Block] = []
        met = set()
        for block in jacobian.blocks:
            found = self._by_key.get(block.position.key)
            if found is not None and _same_place(self.blocks[found][0], block.position):
                met.add(block.position.key)
                yield found, block
            else:
                others.append(block)
        if not others:
            return
        rows = replace(jacobian, blocks=others).rows()
        touched = torch.zeros(self.size, dtype=torch.bool, device=rows.device)
        for block in others:
            touched[block.position.indices] = True
        for number, (position, _) in enumerate(self.blocks):
            if position.key not in met and touched[position.indices].any():
                yield number, DenseBlock(position, rows[..., position.indices])


class KroneckerDraws:
    """Draws of all blocks, each in its block's own form."""

    def __init__(self, precision: KroneckerPrecision, num_samples: int) -> None:
        self.precision, self.count = precision, num_samples
        self.drawn = [part.draw(num_samples) for _, part in precision.blocks]

    def __len__(self) -> int:
        return self.count

    def apply(self, jacobian: Jacobian) -> Tensor:
        shape = self.count, jacobian.num_data, jacobian.num_columns
        result = jacobian.like.new_zeros(shape)
        for number, block in self.precision.touched_blocks(jacobian):
            result += self.drawn[number].apply(block)
        return result


def _same_place(position: BlockPosition, other: BlockPosition) -> bool:
    mine, theirs = position.indices, other.indices
    if isinstance(mine, slice) or isinstance(theirs, slice):
        return isinstance(mine, slice) and mine == theirs
    return same_entries(mine, theirs)


def _alone(block: Block, jacobian: Jacobian) -> Jacobian:
    """Return one block as a Jacobian over its latents only."""
    size = block.position.size
    position = BlockPosition(block.position.key, slice(0, size))
    alone = DenseBlock(position, block.rows())
    return Jacobian([alone], jacobian.num_columns, jacobian.num_data, size, jacobian.like)

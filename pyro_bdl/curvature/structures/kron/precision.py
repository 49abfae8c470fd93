"""The posterior precision of Kronecker-factored curvature: independent blocks and their algebra."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.jacobian import (
    Block,
    BlockPosition,
    DenseBlock,
    Jacobian,
    same_entries,
)
from pyro_bdl.curvature.structures.base import Precision, Whitened


@dataclass(frozen=True)
class KroneckerBlock:
    """The matrix Q diag(values) Q' + rest (1 - Q Q') over a weight (groups, out, in), with
    Q = U kron V: a curvature, whose rest is zero, or a precision.

    There may be fewer directions (groups, s, r) than entries. The complement, orthogonal to them,
    has up to two parts: all outputs with the inputs' complement of V, and the outputs' complement
    of U with the inputs along V. Coordinates in a part are those of the projection onto it.

    :param shape: the weight's shape.
    :param outputs: U, (groups, out, s) with orthonormal columns; None for the identity.
    :param inputs: V, (groups, in, r); None for the identity.
    :param values: (groups, s, r).
    :param rest: a scalar.
    """

    shape: torch.Size
    outputs: Tensor | None
    inputs: Tensor | None
    values: Tensor
    rest: Tensor

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "KroneckerBlock":
        """The same function of the matrix, such as its inverse."""
        return replace(self, values=function(self.values), rest=function(self.rest))

    # Coordinates

    def parts(self) -> list[tuple[torch.Size, Tensor]]:
        """The shapes of the coordinates along the directions and in the complement's parts, and the
        matrix's values there."""
        (groups, out, into), (_, s, r) = self.shape, self.values.shape
        complement = (r < into, self.shape), (s < out, torch.Size((groups, out, r)))
        rest = [(shape, self.rest) for there, shape in complement if there]
        return [(self.values.shape, self.values), *rest]

    def into(self, x: Tensor) -> Tensor:
        """The coordinates (..., groups, s, r) along the directions of x (..., groups, out, in)."""
        x = x if self.inputs is None else x @ self.inputs
        return x if self.outputs is None else self.outputs.mT @ x

    def back(self, x: Tensor) -> Tensor:
        """The weights with coordinates x (..., groups, s, r)."""
        x = x if self.inputs is None else x @ self.inputs.mT
        return x if self.outputs is None else self.outputs @ x

    def coordinates(self, x: Tensor) -> list[Tensor]:
        """The coordinates of weights x (..., groups, out, in) in each of ``parts``."""
        (_, out, into), (_, s, r), u, v = self.shape, self.values.shape, self.outputs, self.inputs
        along = x if v is None else x @ v
        found = [along if u is None else u.mT @ along]
        if v is not None and r < into:
            found.append(x - along @ v.mT)
        if u is not None and s < out:
            found.append(along - u @ found[0])
        return found

    def vectors(self, coordinates: Sequence[Tensor]) -> Tensor:
        """The weights with coordinates in each of ``parts``, projected onto these: twice in all,
        since a precision of the complement may magnify rounding errors."""
        (_, out, into), (_, s, r), u, v = self.shape, self.values.shape, self.outputs, self.inputs
        inside, *rest = coordinates
        result = self.back(inside)
        if v is not None and r < into:
            part = rest.pop(0)
            result = result + part - (part @ v) @ v.mT
        if u is not None and s < out:
            part = rest.pop()
            part = part - u @ (u.mT @ part)
            result = result + (part if v is None else part @ v.mT)
        return result

    def split(self, block: Any) -> list[Any]:
        """The gradients of a block in each of ``parts``, as blocks."""
        (_, out, into), (_, s, r), u, v = self.shape, self.values.shape, self.outputs, self.inputs
        along = block if v is None else block.mapped(lambda a: times(a, v), None)
        found = [along if u is None else along.mapped(None, lambda g: times(g, u))]
        if v is not None and r < into:
            found.append(block.mapped(lambda a: a - times(times(a, v), v.mT), None))
        if u is not None and s < out:
            found.append(along.mapped(None, lambda g: g - times(times(g, u), u.mT)))
        return found

    def padded(self, values: Tensor) -> Tensor:
        """Pad values with zeros, for directions that were added."""
        result = values.new_zeros(self.values.shape)
        result[:, : values.shape[1], : values.shape[2]] = values
        return result

    # The matrix

    def times(self, x: Tensor) -> Tensor:
        """The products with vectors x (..., m)."""
        found = self.coordinates(x.unflatten(-1, self.shape))
        scaled = [part * v for part, (_, v) in zip(found, self.parts(), strict=True)]
        return self.vectors(scaled).reshape(x.shape)

    def matrix(self) -> Tensor:
        size = self.shape.numel()
        return self.times(torch.eye(size, dtype=self.values.dtype, device=self.values.device))

    def diagonal(self) -> Tensor:
        """The diagonal (groups * out * in,)."""
        squares = self._squares()
        result = squares.back(self.values)
        if self.values.shape != self.shape:
            inside = squares.back(torch.ones_like(self.values))
            result = result + (1.0 - inside).clamp(min=0.0) * self.rest
        return result.flatten()

    def trace(self) -> Tensor:
        total, left = self.values.sum(), self.shape.numel() - self.values.numel()
        return total + left * self.rest if left else total

    def rotated_diagonal(self, matrix: Tensor) -> Tensor:
        """Return diag(Q' M Q), (groups, s, r), for M over the flattened entries, or its diagonal
        (groups, out, in)."""
        if matrix.dim() == 3:
            return self._squares().into(matrix)
        eye = torch.eye(self.values.numel(), dtype=matrix.dtype, device=matrix.device)
        rows = self.back(eye.reshape(-1, *self.values.shape)).flatten(1)
        return ((rows @ matrix) * rows).sum(1).reshape(self.values.shape)

    def _squares(self) -> "KroneckerBlock":
        """The squared entries of U and V."""
        outputs, inputs = (None if q is None else q.square() for q in (self.outputs, self.inputs))
        return replace(self, outputs=outputs, inputs=inputs)

    # The Gaussian with this precision

    def logdet(self) -> Tensor:
        return self.mapped(torch.log).trace()

    def quadratic(self, x: Tensor) -> Tensor:
        inside = self.into(x.unflatten(-1, self.shape)).square()
        above = (inside * (self.values - self.rest)).sum((-3, -2, -1))
        return above + self.rest * x.square().sum(-1)

    def solve(self, x: Tensor) -> Tensor:
        return self.mapped(torch.reciprocal).times(x)

    def variances(self) -> Tensor:
        return self.mapped(torch.reciprocal).diagonal()

    def weighted_trace(self, weights: Tensor) -> Tensor:
        if bool((weights != weights[0]).any()):
            return (weights * self.variances()).sum()
        return weights[0] * self.mapped(torch.reciprocal).trace()  # which needs no rotation

    def draw(self, num_samples: int) -> "WeightDraws":
        like, noise = self.values, []
        for shape, values in self.parts():
            drawn = torch.randn(num_samples, *shape, dtype=like.dtype, device=like.device)
            noise.append(drawn.mul_(values.rsqrt()))
        return WeightDraws(self, noise)

    def whitened(self, block: Any) -> Iterator[Whitened]:
        """Yield blocks and weights whose Gram matrices add up to covariances."""
        if isinstance(block, DenseBlock):
            rows = self.coordinates(block.values.unflatten(-1, self.shape))
            for part, (_, values) in zip(rows, self.parts(), strict=True):
                yield replace(block, values=(part * values.rsqrt()).flatten(-3)), None
            return
        inside, *complement = self.split(block)
        yield inside, self.values.reciprocal()
        for part in complement:
            yield replace(part, gradients=part.gradients * self.rest.rsqrt()), None


class WeightDraws:
    """Draws of one weight, in the coordinates of its block's parts.

    The gradients of functions are rotated there instead of the draws, which are far more numbers.

    :param noise: (S, *shape) for each of ``block.parts``.
    """

    def __init__(self, block: KroneckerBlock, noise: list[Tensor]) -> None:
        self.block, self.noise = block, noise

    def vectors(self) -> Tensor:
        """Return the draws themselves, (S, groups * out * in)."""
        return self.block.vectors(self.noise).flatten(1)

    def apply(self, block: Any) -> Tensor:
        """Return the products with a block's gradients, (S, n, K)."""
        if isinstance(block, DenseBlock):
            return block.apply(self.vectors())
        pairs = zip(self.block.split(block), self.noise, strict=True)
        first, *others = (part.apply(noise) for part, noise in pairs)
        return sum(others, first)


def times(x: Tensor, basis: Tensor) -> Tensor:
    """Vectors x (..., groups, m) times a basis (groups, m, r) of their own group."""
    return torch.einsum("...gi,gij->...gj", x, basis)


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
        return self.draw(num_samples).vectors()

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
        terms = [block.weighted_trace(weights[place.indices]) for place, block in self.blocks]
        return torch.stack(terms).sum()

    def whitened(self, jacobian: Jacobian) -> Iterator[Whitened]:
        for number, block in self.by_block(jacobian):
            yield from self.blocks[number][1].whitened(block)

    def by_block(self, jacobian: Jacobian) -> Iterator[tuple[int, Any]]:
        """Yield the number of every block that the Jacobian affects, and the Jacobian restricted to
        it: a block of the Jacobian for a weight with Kronecker factors, else a separate Jacobian.

        It is in rows if the Jacobian's blocks are others.
        """
        others: list[Block] = []
        met = set()
        for block in jacobian.blocks:
            number = self._by_key.get(block.position.key)
            if number is not None and _same_place(self.blocks[number][0], block.position):
                met.add(number)
                yield number, self._restricted(number, block, jacobian)
            else:
                others.append(block)
        rows = replace(jacobian, blocks=others).rows() if others else jacobian.like
        for number, (position, _) in enumerate(self.blocks) if others else ():
            part = rows[..., position.indices]
            if number not in met and part.any():
                yield number, self._restricted(number, DenseBlock(position, part), jacobian)

    def _restricted(self, number: int, block: Block, jacobian: Jacobian) -> Any:
        if isinstance(self.blocks[number][1], KroneckerBlock):
            return block
        size = block.position.size
        alone = DenseBlock(BlockPosition(block.position.key, slice(0, size)), block.rows())
        return replace(jacobian, blocks=[alone], size=size)


class KroneckerDraws:
    """Draws of all blocks, each in its block's own form."""

    def __init__(self, precision: KroneckerPrecision, num_samples: int) -> None:
        self.precision, self.count = precision, num_samples
        self.drawn = [part.draw(num_samples) for _, part in precision.blocks]

    def __len__(self) -> int:
        return self.count

    def vectors(self) -> Tensor:
        return self._vectors

    @cached_property
    def _vectors(self) -> Tensor:
        """Rotated once, since every piece of the data asks for them."""
        result = self.precision.like.new_empty(self.count, self.precision.size)
        for (position, _), drawn in zip(self.precision.blocks, self.drawn, strict=True):
            result[:, position.indices] = drawn.vectors()
        return result

    def apply(self, jacobian: Jacobian) -> Tensor:
        shape = self.count, jacobian.num_data, jacobian.num_columns
        result = jacobian.like.new_zeros(shape)
        for number, block in self.precision.by_block(jacobian):
            result += self.drawn[number].apply(block)
        return result


def _same_place(position: BlockPosition, other: BlockPosition) -> bool:
    mine, theirs = position.indices, other.indices
    if isinstance(mine, slice) or isinstance(theirs, slice):
        return isinstance(mine, slice) and mine == theirs
    return same_entries(mine, theirs)

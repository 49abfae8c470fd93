"""The posterior precision of Kronecker-factored curvature: independent blocks and their algebra."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.block_position import BlockPosition
from pyro_bdl.curvature.jacobian.jacobian import Block, DenseBlock, Jacobian, same_entries
from pyro_bdl.curvature.structures.base import Precision, Whitened


@dataclass(frozen=True)
class Side:
    """Directions of a weight's outputs or inputs.

    :param columns: orthonormal, (groups, m, r); None for the unit vectors.
    :param orthogonal: whether they are the space orthogonal to the columns instead, in which a
        vector's coordinates are those of its projection.
    """

    columns: Tensor | None
    orthogonal: bool = False

    def into(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return the coordinates of x (..., groups, *, *), whose last or last but one axis they
        take."""
        if self.columns is None:
            return x
        inside = _times(x, self.columns, dim)
        return x - _times(inside, self.columns.mT, dim) if self.orthogonal else inside

    def back(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return the vectors with these coordinates."""
        if self.columns is None or self.orthogonal:
            return self.into(x, dim)
        return _times(x, self.columns.mT, dim)


def _times(x: Tensor, matrix: Tensor, dim: int) -> Tensor:
    return x @ matrix if dim == -1 else matrix.mT @ x


@dataclass(frozen=True)
class Directions:
    """Directions u kron v in the entries of a weight (groups, out, in)."""

    outputs: Side
    inputs: Side

    def into(self, x: Tensor) -> Tensor:
        """Return the coordinates (..., groups, s, r) of weights x (..., groups, out, in)."""
        return self.outputs.into(self.inputs.into(x), -2)

    def back(self, x: Tensor) -> Tensor:
        """Return the weights with these coordinates."""
        return self.outputs.back(self.inputs.back(x), -2)


@dataclass(frozen=True)
class Eigenbasis:
    """Q = U kron V over the entries of a weight (groups, out, in).

    There may be fewer directions (groups, s, r) than entries; the complement is the space
    orthogonal to them.

    :param shape: the weight's shape.
    :param outputs: U, (groups, out, s) with orthonormal columns; None for the identity.
    :param inputs: V, (groups, in, r); None for the identity.
    """

    shape: torch.Size
    outputs: Tensor | None
    inputs: Tensor | None

    @property
    def directions(self) -> torch.Size:
        """The shape of the directions, (groups, s, r)."""
        groups, out, into = self.shape
        s = out if self.outputs is None else self.outputs.shape[2]
        r = into if self.inputs is None else self.inputs.shape[2]
        return torch.Size((groups, s, r))

    @property
    def complete(self) -> bool:
        return self.directions == self.shape

    @property
    def inside(self) -> Directions:
        return Directions(Side(self.outputs), Side(self.inputs))

    def parts(self) -> list[tuple[Directions, torch.Size]]:
        """The directions, and the orthogonal parts of the complement, with the shapes of their
        coordinates."""
        (groups, out, into), (_, s, r) = self.shape, self.directions
        found = [(self.inside, self.directions)]
        if r < into:
            found.append((Directions(Side(None), Side(self.inputs, orthogonal=True)), self.shape))
        if s < out:
            others = Directions(Side(self.outputs, orthogonal=True), Side(self.inputs))
            found.append((others, torch.Size((groups, out, r))))
        return found

    def split(self, block: Any) -> list[Any]:
        """Return the gradients of a block along each of ``parts``, as blocks."""
        (_, out, into), (_, s, r) = self.shape, self.directions
        rest = []
        if r < into:
            block, other = block.split_inputs(self.inputs)
            rest.append(other)
        else:
            block = block.rotated(self.inputs, None)
        if s < out:
            block, other = block.split_outputs(self.outputs)
            rest.append(other)
        else:
            block = block.rotated(None, self.outputs)
        return [block, *rest]

    def diagonal(self, values: Tensor) -> Tensor:
        """Return diag(Q diag(values) Q'), (groups, out, in), for values (groups, s, r)."""
        return self._squares().back(values)

    def rotated_diagonal(self, matrix: Tensor) -> Tensor:
        """Return diag(Q' M Q), (groups, s, r), for M over the flattened entries, or its diagonal
        (groups, out, in)."""
        if matrix.dim() == 3:
            return self._squares().into(matrix)
        eye = torch.eye(self.directions.numel(), dtype=matrix.dtype, device=matrix.device)
        rows = self.inside.back(eye.reshape(-1, *self.directions)).flatten(1)
        return ((rows @ matrix) * rows).sum(1).reshape(self.directions)

    def complement_shares(self) -> Tensor:
        """Return the squared lengths of the unit vectors' projections onto the complement."""
        inside: Any = 1.0
        if self.outputs is not None:
            inside = self.outputs.square().sum(2)[:, :, None]
        if self.inputs is not None:
            inside = inside * self.inputs.square().sum(2)[:, None]
        return (1.0 - inside).clamp(min=0.0)

    def _squares(self) -> Directions:
        outputs, inputs = (None if q is None else q.square() for q in (self.outputs, self.inputs))
        return Directions(Side(outputs), Side(inputs))

    def matrix(self, values: Tensor) -> Tensor:
        """Return Q diag(values) Q' over the flattened entries."""
        eye = torch.eye(self.shape.numel(), dtype=values.dtype, device=values.device)
        rows = self.inside.into(eye.reshape(-1, *self.shape)).flatten(1)
        return (rows * values.flatten()) @ rows.mT

    def padded(self, values: Tensor) -> Tensor:
        """Pad values with zeros, for directions that were added."""
        result = values.new_zeros(self.directions)
        result[:, : values.shape[1], : values.shape[2]] = values
        return result


class WeightDraws:
    """Draws of one weight, in the coordinates of its eigenbasis and complement.

    The gradients of functions are rotated there instead of the draws, which are far more numbers.

    :param noise: (S, *shape) for each of ``basis.parts()``.
    """

    def __init__(self, basis: Eigenbasis, noise: list[Tensor]) -> None:
        self.basis, self.noise = basis, noise

    def vectors(self) -> Tensor:
        """Return the draws themselves, (S, groups * out * in)."""
        (first, *others), (inside, *complement) = self.basis.parts(), self.noise
        result = first[0].back(inside)
        for (part, _), noise in zip(others, complement, strict=True):
            result += part.back(noise)
        return result.flatten(1)

    def apply(self, block: Any) -> Tensor:
        """Return the products with a block's gradients, (S, n, K)."""
        if isinstance(block, DenseBlock):
            return block.apply(self.vectors())
        pairs = zip(self.basis.split(block), self.noise, strict=True)
        return _total(part.apply(noise) for part, noise in pairs)


class WeightPrecision:
    """The precision Q diag(values) Q' + rest (1 - Q Q') of one weight, with Q a Kronecker product.

    :param position: the weight's position in the subset.
    :param basis: Q.
    :param values: positive, (groups, s, r).
    :param rest: the precision in Q's complement, a positive scalar; None if Q is complete.
    """

    def __init__(
        self, position: BlockPosition, basis: Eigenbasis, values: Tensor, rest: Tensor | None
    ) -> None:
        if not (values > 0).all() or (rest is not None and not rest > 0):
            raise ValueError(
                f"the posterior precision of '{position.key[0]}' is not positive: directions "
                "without curvature need a prior with a finite variance"
            )
        self.basis, self.values, self.rest = basis, values, rest
        self.size = basis.shape.numel()

    def _parts(self) -> Iterator[tuple[Directions, torch.Size, Tensor]]:
        """The directions, the shape of their coordinates, and their precisions."""
        for number, (part, shape) in enumerate(self.basis.parts()):
            precision = self.rest if number else self.values
            assert precision is not None
            yield part, shape, precision

    def logdet(self) -> Tensor:
        total = self.values.log().sum()
        if self.rest is None:
            return total
        return total + (self.size - self.values.numel()) * self.rest.log()

    def draw(self, num_samples: int) -> WeightDraws:
        like = self.values
        noise = [
            torch.randn(num_samples, *shape, dtype=like.dtype, device=like.device).mul_(
                precision.rsqrt()
            )
            for _, shape, precision in self._parts()
        ]
        return WeightDraws(self.basis, noise)

    def quadratic(self, x: Tensor) -> Tensor:
        inside = self.basis.inside.into(x.unflatten(-1, self.basis.shape)).square()
        if self.rest is None:
            return (inside * self.values).sum((-3, -2, -1))
        above = (inside * (self.values - self.rest)).sum((-3, -2, -1))
        return above + self.rest * x.square().sum(-1)

    def solve(self, x: Tensor) -> Tensor:
        weights = x.unflatten(-1, self.basis.shape)
        # the complement is projected onto twice: its precision magnifies rounding errors
        terms = (part.back(part.into(weights) / precision) for part, _, precision in self._parts())
        return _total(terms).reshape(x.shape)

    def variances(self) -> Tensor:
        result = self.basis.diagonal(self.values.reciprocal())
        if self.rest is not None:
            result = result + self.basis.complement_shares() / self.rest
        return result.flatten()

    def whitened(self, block: Any) -> Iterator[Whitened]:
        """Yield blocks and weights whose Gram matrices add up to covariances."""
        if isinstance(block, DenseBlock):
            rows = block.values.unflatten(-1, self.basis.shape)
            for part, _, precision in self._parts():
                values = (part.into(rows) * precision.rsqrt()).flatten(-3)
                yield replace(block, values=values), None
            return
        inside, *complement = self.basis.split(block)
        yield inside, self.values.reciprocal()
        for part in complement:
            assert self.rest is not None
            yield replace(part, gradients=part.gradients * self.rest.rsqrt()), None


def _total(terms: Iterable[Tensor]) -> Tensor:
    first, *others = terms
    for term in others:
        first = first + term
    return first


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
        if isinstance(self.blocks[number][1], WeightPrecision):
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

"""The posterior precision of Kronecker-factored curvature: independent blocks and their algebra."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.entries import Place
from pyro_bdl.curvature.jacobian.jacobian import Block, Dense, Jacobian, same_entries
from pyro_bdl.curvature.structures.base import Precision
from pyro_bdl.curvature.structures.kron.eigen_precision import EigenPrecision


class KroneckerPrecision(Precision):
    """Independent blocks, each with a precision of its own.

    :param parts: for each block its place and precision; together they cover all of (p,).
    """

    def __init__(self, size: int, parts: list[tuple[Place, Any]], like: Tensor) -> None:
        self.size, self.parts, self.like = size, parts, like
        self._by_key = {place.key: number for number, (place, _) in enumerate(parts)}

    def logdet(self) -> Tensor:
        return torch.stack([precision.logdet() for _, precision in self.parts]).sum()

    def sample(self, num_samples: int) -> Tensor:
        result = self.like.new_empty(num_samples, self.size)
        for place, precision in self.parts:
            result[:, place.positions] = precision.sample(num_samples)
        return result

    def draw(self, num_samples: int) -> "KroneckerDraws":
        return KroneckerDraws(self, num_samples)

    def quadratic(self, x: Tensor) -> Tensor:
        terms = [precision.quadratic(x[..., place.positions]) for place, precision in self.parts]
        return torch.stack(terms).sum(0)

    def solve(self, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        for place, precision in self.parts:
            result[..., place.positions] = precision.solve(x[..., place.positions])
        return result

    def variances(self) -> Tensor:
        result = self.like.new_zeros(self.size)
        for place, precision in self.parts:
            values = precision.variances()
            result = result.index_put((place.numbers(result.device),), values)
        return result

    def covariance(self, jacobian: Jacobian) -> Tensor:
        n, columns = jacobian.num_data, jacobian.num_columns
        result = jacobian.like.new_zeros(n, columns, columns)
        for number, block in self.met(jacobian):
            result += self.parts[number][1].covariance(block)
        return result

    def output_variances(self, jacobian: Jacobian) -> Tensor:
        result = jacobian.like.new_zeros(jacobian.num_data, jacobian.num_columns)
        for number, block in self.met(jacobian):
            result += self.parts[number][1].output_variances(block)
        return result

    def joint_covariance(self, jacobian: Jacobian) -> Tensor:
        result = jacobian.joint_zeros()
        for number, block in self.met(jacobian):
            result += self.parts[number][1].joint_covariance(block)
        return result

    def met(self, jacobian: Jacobian) -> Iterator[tuple[int, Any]]:
        """The numbers of parts, and what of the Jacobian lies in each: a block for that of a
        product, and a Jacobian for the others."""
        for number, block in self._blocks(jacobian):
            is_product = isinstance(self.parts[number][1], EigenPrecision)
            yield number, block if is_product else _alone(block, jacobian)

    def _blocks(self, jacobian: Jacobian) -> Iterator[tuple[int, Block]]:
        """The same with blocks for all, as rows where they are not of the same latents."""
        others: list[Block] = []
        met = set()
        for block in jacobian.blocks:
            found = self._by_key.get(block.place.key)
            if found is not None and _same_place(self.parts[found][0], block.place):
                met.add(block.place.key)
                yield found, block
            else:
                others.append(block)
        if not others:
            return
        rows = replace(jacobian, blocks=others).rows()
        touched = torch.zeros(self.size, dtype=torch.bool, device=rows.device)
        for block in others:
            touched[block.place.positions] = True
        for number, (place, _) in enumerate(self.parts):
            if place.key not in met and touched[place.positions].any():
                yield number, Dense(place, rows[..., place.positions])


class KroneckerDraws:
    """Draws of every part, each in its own form."""

    def __init__(self, precision: KroneckerPrecision, num_samples: int) -> None:
        self.precision, self.count = precision, num_samples
        self.drawn = [part.draw(num_samples) for _, part in precision.parts]

    def __len__(self) -> int:
        return self.count

    def apply(self, jacobian: Jacobian) -> Tensor:
        shape = self.count, jacobian.num_data, jacobian.num_columns
        result = jacobian.like.new_zeros(shape)
        for number, block in self.precision.met(jacobian):
            result += self.drawn[number].apply(block)
        return result


def _same_place(place: Place, other: Place) -> bool:
    mine, theirs = place.positions, other.positions
    if isinstance(mine, slice) or isinstance(theirs, slice):
        return isinstance(mine, slice) and mine == theirs
    return same_entries(mine, theirs)


def _alone(block: Block, jacobian: Jacobian) -> Jacobian:
    """One block as a Jacobian of its own latents."""
    size = block.place.size
    place = Place(block.place.key, slice(0, size))
    alone = Dense(place, block.rows())
    return Jacobian([alone], jacobian.num_columns, jacobian.num_data, size, jacobian.like)

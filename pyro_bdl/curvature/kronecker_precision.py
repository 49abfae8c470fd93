"""The posterior precision of Kronecker-factored curvature: independent blocks and their algebra."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.eigen_precision import EigenPrecision
from pyro_bdl.curvature.jacobian import Block, Dense, Jacobian, Place, same_entries


class KroneckerPrecision:
    """Independent blocks, each with a precision of its own.

    :param parts: for each block its place and precision; together they cover all of (p,).
    """

    def __init__(self, size: int, parts: list[tuple[Place, Any]], like: Tensor) -> None:
        self.size, self.parts, self.like = size, parts, like
        self._by_key = {place.key: (place, precision) for place, precision in parts}

    def logdet(self) -> Tensor:
        return torch.stack([precision.logdet() for _, precision in self.parts]).sum()

    def sample(self, num_samples: int) -> Tensor:
        result = self.like.new_empty(num_samples, self.size)
        for place, precision in self.parts:
            result[:, place.positions] = precision.sample(num_samples)
        return result

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
        for precision, block in self._met(jacobian):
            result += precision.covariance(block)
        return result

    def output_variances(self, jacobian: Jacobian) -> Tensor:
        result = jacobian.like.new_zeros(jacobian.num_data, jacobian.num_columns)
        for precision, block in self._met(jacobian):
            result += precision.output_variances(block)
        return result

    def joint_covariance(self, jacobian: Jacobian) -> Tensor:
        result = jacobian.joint_zeros()
        for precision, block in self._met(jacobian):
            result += precision.joint_covariance(block)
        return result

    def _met(self, jacobian: Jacobian) -> Iterator[tuple[Any, Any]]:
        """The precisions and what of the Jacobian lies in each, a block for that of a product and
        a Jacobian for the others."""
        for precision, block in self._blocks(jacobian):
            is_product = isinstance(precision, EigenPrecision)
            yield precision, block if is_product else _alone(block, jacobian)

    def _blocks(self, jacobian: Jacobian) -> Iterator[tuple[Any, Block]]:
        """The same with blocks for all, as rows where they are not of the same latents."""
        others: list[Block] = []
        met = set()
        for block in jacobian.blocks:
            found = self._by_key.get(block.place.key)
            if found is not None and _same_place(found[0], block.place):
                met.add(block.place.key)
                yield found[1], block
            else:
                others.append(block)
        if not others:
            return
        rows = replace(jacobian, blocks=others).rows()
        touched = torch.zeros(self.size, dtype=torch.bool, device=rows.device)
        for block in others:
            touched[block.place.positions] = True
        for place, precision in self.parts:
            if place.key not in met and touched[place.positions].any():
                yield precision, Dense(place, rows[..., place.positions])


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

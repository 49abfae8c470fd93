"""Sums over discrete variables of products of factors, in log space, plates included."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_bdl.errors import UnsupportedProgramError

ROOM = 6  # dimensions from the right that are left to plates and batches


class Variable(NamedTuple):
    """A discrete site that is summed out, with the values (K, *event) of its support."""

    name: str
    values: Tensor
    plates: frozenset[str]


class Plate(NamedTuple):
    """A plate's dimension, how many cells it has, and N/B where it is subsampled."""

    dim: int
    size: int
    scale: float


class Factor(NamedTuple):
    """A log density as a table: a dimension for each symbol, in their order, then ``ROOM`` of
    plates.

    ``evidence`` tells that it is no conditional distribution of discrete sites alone.
    """

    table: Tensor
    symbols: tuple[int, ...]
    plates: frozenset[str]
    evidence: bool = False


class Elimination:
    """Sums over discrete variables of products of factors.

    A variable is summed out after those of the plates inside its own. Where a plate holds several
    factors for one value of a variable outside of it, these are multiplied, each to the power N/B.

    :param variables: symbol -> variable.
    """

    def __init__(self, variables: Mapping[int, Variable], plates: Mapping[str, Plate]) -> None:
        self.variables, self.plates = variables, plates

    def sizes(self, plates: Iterable[str]) -> tuple[int, ...]:
        """The sizes of the ``ROOM`` dimensions inside of plates."""
        sizes = {self.plates[name].dim: self.plates[name].size for name in plates}
        return tuple(sizes.get(dim, 1) for dim in range(-ROOM, 0))

    def reduced(self, factor: Factor, plates: frozenset[str]) -> Factor:
        """The product of a factor over its other plates."""
        outer = [self.plates[name] for name in factor.plates - plates]
        if not outer:
            return factor
        table = factor.table
        repeated = math.prod(plate.size for plate in outer if table.shape[plate.dim] == 1)
        scale = repeated * math.prod(plate.scale for plate in outer)
        dims = [plate.dim for plate in outer if table.shape[plate.dim] > 1]
        table = table.sum(dims, keepdim=True) if dims else table
        table = table if scale == 1.0 else table * scale
        return factor._replace(table=table, plates=factor.plates & plates)

    def product(self, factors: Sequence[Factor]) -> Factor:
        """The product of factors, over all of their symbols."""
        if len(factors) == 1:
            return factors[0]
        symbols = tuple(sorted({symbol for factor in factors for symbol in factor.symbols}))
        small_first = sorted(factors, key=lambda factor: len(factor.symbols))
        tables = [_spread(factor.table, factor.symbols, symbols) for factor in small_first]
        plates = frozenset().union(*(factor.plates for factor in factors))
        evidence = any(factor.evidence for factor in factors)
        return Factor(functools.reduce(torch.add, tables), symbols, plates, evidence)

    def eliminate(
        self, factors: Sequence[Factor], symbols: Iterable[int], *, partly: bool = False
    ) -> tuple[list[Factor], list[tuple[int, Factor]]]:
        """Sum variables out, those of the innermost plates first, then as in the program.

        :param partly: leave those that depend on variables of other plates.
        :returns: the factors left, and the product that each variable was summed out of.
        :raises UnsupportedProgramError: where variables of crossing plates depend on each other.
        """
        left, steps = list(factors), []
        for symbol in sorted(symbols, key=lambda s: (-len(self.variables[s].plates), s)):
            plates = self.variables[symbol].plates
            own = [factor for factor in left if symbol in factor.symbols]
            others = {
                self.variables[other].name
                for factor in own
                if not factor.plates <= plates
                for other in factor.symbols
                if not self.variables[other].plates <= plates
            }
            if others and partly:
                continue
            if others:
                raise UnsupportedProgramError(
                    f"the discrete sites '{self.variables[symbol].name}' and '{min(others)}' stand "
                    "in plates that cross and depend on each other, so that their sum does not "
                    "factorize: sample one of them outside of its plate, or marginalize it in the "
                    "program"
                )
            product = self.product([self.reduced(factor, plates) for factor in own])
            place = product.symbols.index(symbol)
            rest = product.symbols[:place] + product.symbols[place + 1 :]
            summed = product._replace(table=product.table.logsumexp(place), symbols=rest)
            left = [*(factor for factor in left if symbol not in factor.symbols), summed]
            steps.append((symbol, product))
        return left, steps

    def total(self, factors: Sequence[Factor], plates: frozenset[str] = frozenset()) -> Tensor:
        """The log of the sum over all variables, a table with the dimensions of ``plates``."""
        left, _ = self.eliminate(factors, symbols_of(factors))
        return functools.reduce(torch.add, [self.reduced(f, plates).table for f in left])


def symbols_of(factors: Iterable[Factor]) -> set[int]:
    """The symbols of all variables of factors."""
    return {symbol for factor in factors for symbol in factor.symbols}


def connected(symbols: Iterable[int], factors: Sequence[Factor]) -> list[Factor]:
    """The factors that are connected to variables, in their order."""
    reached = set(symbols)
    while True:
        near = [factor for factor in factors if reached.intersection(factor.symbols)]
        if symbols_of(near) <= reached:
            return near
        reached |= symbols_of(near)


def by_symbols(
    table: Tensor, symbols: Mapping[int, int], event_dim: int = 0
) -> tuple[Tensor, tuple[int, ...]]:
    """A tensor by position, (*enumerated, *batch, *event), with a dimension for each of its symbols
    in their order, then ``ROOM`` of its batch, then its event; and these symbols."""
    rank = table.dim() - event_dim
    dims = {s: rank + dim for dim, s in symbols.items() if rank >= -dim}
    found = tuple(s for s in sorted(dims) if table.shape[dims[s]] > 1)
    order, left = [dims[symbol] for symbol in found], max(0, rank - ROOM)
    order += [dim for dim in range(left) if dim not in order]
    if order != list(range(left)):
        table = table.permute(*order, *range(left, table.dim()))
    if rank >= ROOM and left == len(found):  # spares graphs an operation that changes nothing
        return table, found
    ones = (1,) * max(0, ROOM - rank)
    return table.reshape(table.shape[: len(found)] + ones + table.shape[left:]), found


def at_values(
    table: Tensor, symbols: Sequence[int], drawn: Mapping[int, Tensor], event_dim: int = 0
) -> Tensor:
    """A table by symbols at indices of some of them, each (*ROOM dims)."""
    for place in reversed(range(len(symbols))):
        if symbols[place] not in drawn:
            continue
        index, table = drawn[symbols[place]], table.movedim(place, 0)
        ones = (1,) * (table.dim() - ROOM - event_dim)
        index = index.reshape(ones + index.shape + (1,) * event_dim)
        table = torch.take_along_dim(table, index, 0)[0]
    return table


def _spread(table: Tensor, own: tuple[int, ...], symbols: tuple[int, ...]) -> Tensor:
    """A table with a dimension for each of ``symbols``, of which it has its own."""
    if own == symbols:
        return table
    sizes = iter(table.shape)
    ones = [next(sizes) if symbol in own else 1 for symbol in symbols]
    return table.reshape(*ones, *sizes)

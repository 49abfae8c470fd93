"""Sums over discrete variables of products of factors, in log space, plates included."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_bdl.errors import UnsupportedProgramError

ROOM = 6  # dimensions from the right that are left to plates and batches


class Variable(NamedTuple):
    """A discrete site that is summed out: the values of its support along one dimension."""

    name: str
    values: Tensor  # (K, *ones, *event)
    plates: frozenset[str]
    event_dim: int


class Plate(NamedTuple):
    """A plate's dimension, how many cells it has, and N/B where it is subsampled."""

    dim: int
    size: int
    scale: float


class Statement(NamedTuple):
    """A sample statement: its site, the symbols (by dimension) of discrete sites that its density
    depends on, and its plates."""

    name: str
    kind: str  # "discrete", or the attribute of the run that holds the site
    site: Any
    symbols: Mapping[int, int]
    plates: frozenset[str]


def symbols_of(statement: Statement) -> dict[int, int]:
    """The symbols in a statement's distribution and mask, by dimension."""
    site = statement.site
    shapes = [site.distribution.batch_shape]
    if isinstance(site.mask, Tensor):
        shapes.append(site.mask.shape)
    return {
        dim: symbol
        for dim, symbol in statement.symbols.items()
        if any(len(shape) >= -dim and shape[dim] > 1 for shape in shapes)
    }


class Factor:
    """A log density as a table: a dimension for each symbol, in their order, then ``ROOM`` of
    plates.

    The table is computed when it is first asked for, in the gradient mode of the construction.

    :param make: the table, or what computes it.
    :param evidence: tells that it is no conditional distribution of discrete sites alone.
    """

    __slots__ = ("_has_gradients", "_made", "evidence", "plates", "symbols")

    def __init__(
        self,
        make: Tensor | Callable[[], Tensor],
        symbols: tuple[int, ...],
        plates: frozenset[str],
        evidence: bool = False,
    ) -> None:
        self._made = make
        self.symbols, self.plates, self.evidence = symbols, plates, evidence
        self._has_gradients = torch.is_grad_enabled()

    @property
    def table(self) -> Tensor:
        if not isinstance(self._made, Tensor):
            with torch.set_grad_enabled(self._has_gradients):
                self._made = self._made()
        return self._made

    def changed(
        self,
        change: Callable[[Tensor], Tensor],
        *,
        symbols: tuple[int, ...] | None = None,
        plates: frozenset[str] | None = None,
    ) -> "Factor":
        """A factor whose table is a function of this one's."""
        return Factor(
            lambda: change(self.table),
            self.symbols if symbols is None else symbols,
            self.plates if plates is None else plates,
            self.evidence,
        )


class Elimination:
    """Sums over discrete variables of products of factors, plates included.

    A variable is summed out after those of the plates inside its own. Where a plate holds several
    factors for one value of a variable outside of it, these are multiplied.
    """

    def __init__(self, variables: Mapping[int, Variable], plates: Mapping[str, Plate]) -> None:
        self.variables, self.plates = variables, plates

    def factor(
        self,
        table: Tensor,
        symbols: Mapping[int, int],
        plates: frozenset[str],
        *,
        evidence: bool = False,
    ) -> Factor:
        """A log density by position as a factor; dims of no plate are summed over."""
        table, found = by_symbols(table, symbols)
        own = range(-ROOM, 0)
        inside = {self.plates[name].dim for name in plates}
        loose = [dim for dim in own if table.shape[dim] > 1 and dim not in inside]
        if loose:
            table = table.sum(loose, keepdim=True)
        return Factor(table, found, plates, evidence)

    def sizes(self, plates: Iterable[str]) -> tuple[int, ...]:
        """The sizes of the ``ROOM`` dims inside of plates."""
        sizes = {self.plates[name].dim: self.plates[name].size for name in plates}
        return tuple(sizes.get(dim, 1) for dim in range(-ROOM, 0))

    def reduced(self, factor: Factor, kept: frozenset[str]) -> Factor:
        """The product of a factor over its plates that are not ``kept``, each to the power N/B."""
        gone = [self.plates[name] for name in factor.plates - kept]
        if not gone:
            return factor

        def over_plates(table: Tensor) -> Tensor:
            scale = 1.0
            for plate in gone:
                scale *= plate.scale * (plate.size if table.shape[plate.dim] == 1 else 1)
            where = [plate.dim for plate in gone if table.shape[plate.dim] > 1]
            table = table.sum(where, keepdim=True) if where else table
            return table if scale == 1.0 else table * scale

        return factor.changed(over_plates, plates=factor.plates & kept)

    def product(self, factors: Sequence[Factor]) -> Factor:
        """The product of factors, over all of their symbols."""
        if len(factors) == 1:
            return factors[0]
        symbols = tuple(sorted({symbol for factor in factors for symbol in factor.symbols}))
        plates = frozenset().union(*(factor.plates for factor in factors))
        by_size = sorted(factors, key=lambda factor: len(factor.symbols))  # small tables first

        def multiplied() -> Tensor:
            tables = [spread(factor.table, factor.symbols, symbols) for factor in by_size]
            return functools.reduce(torch.add, tables)

        return Factor(multiplied, symbols, plates, any(factor.evidence for factor in factors))

    def bucket(self, symbol: int, factors: Sequence[Factor]) -> tuple[Factor | None, list[Factor]]:
        """The product of the factors of a variable, reduced to its plates, and the other factors;
        None where variables of other plates are in the way."""
        plates = self.variables[symbol].plates
        mine = [factor for factor in factors if symbol in factor.symbols]
        for factor in mine:
            if factor.plates <= plates:
                continue
            if any(not self.variables[other].plates <= plates for other in factor.symbols):
                return None, []
        rest = [factor for factor in factors if symbol not in factor.symbols]
        return self.product([self.reduced(factor, plates) for factor in mine]), rest

    def without(self, symbol: int, factors: Sequence[Factor]) -> list[Factor] | None:
        """The factors after the sum over a variable; None where this is not its turn."""
        product, rest = self.bucket(symbol, factors)
        if product is None:
            return None
        return [*rest, self.summed(product, [symbol])]

    def summed(self, factor: Factor, symbols: Sequence[int]) -> Factor:
        """The sum of a factor over some of its variables."""
        where = [factor.symbols.index(symbol) for symbol in symbols]
        kept = tuple(symbol for symbol in factor.symbols if symbol not in symbols)
        if not where:
            return factor
        return factor.changed(lambda table: torch.logsumexp(table, where), symbols=kept)

    def order(self, factors: Iterable[Factor]) -> list[int]:
        """The variables of factors, those of the innermost plates first, then as in the program."""
        found = {symbol for factor in factors for symbol in factor.symbols}
        return sorted(found, key=lambda symbol: (-len(self.variables[symbol].plates), symbol))

    def all_summed(
        self, factors: Sequence[Factor]
    ) -> tuple[list[Factor], list[tuple[int, Factor]]]:
        """The factors after all sums, and the product that each variable was summed out of.

        :raises UnsupportedProgramError: where variables of crossing plates depend on each other.
        """
        steps: list[tuple[int, Factor]] = []
        now: list[Factor] = list(factors)
        for symbol in self.order(factors):
            product, rest = self.bucket(symbol, now)
            if product is None:
                self._refuse_crossing(symbol, now)
            assert product is not None
            steps.append((symbol, product))
            now = [*rest, self.summed(product, [symbol])]
            _ = now[-1].table  # at once, since a long chain would be a deep recursion later
        return now, steps

    def total(self, factors: Sequence[Factor], kept: frozenset[str] = frozenset()) -> Any:
        """The log of the sum over all variables, a table with the dims of the plates ``kept``."""
        now, _ = self.all_summed(factors)
        return sum((self.reduced(factor, kept).table for factor in now), start=0.0)

    def connected(self, symbols: Iterable[int], factors: Sequence[Factor]) -> list[Factor]:
        """The factors that are connected to variables, in their order."""
        reached = set(symbols)
        found: set[int] = set()
        while True:
            new = {
                number
                for number, factor in enumerate(factors)
                if number not in found and reached.intersection(factor.symbols)
            }
            if not new:
                return [factors[number] for number in sorted(found)]
            found |= new
            reached.update(symbol for number in new for symbol in factors[number].symbols)

    def _refuse_crossing(self, symbol: int, factors: Sequence[Factor]) -> None:
        variable = self.variables[symbol]
        others = {
            self.variables[other].name
            for factor in factors
            if symbol in factor.symbols
            for other in factor.symbols
            if not self.variables[other].plates <= variable.plates
        }
        raise UnsupportedProgramError(
            f"the discrete sites '{variable.name}' and '{min(others)}' stand in plates that cross "
            "and depend on each other, so that their sum does not factorize: sample one of them "
            "outside of its plate, or marginalize it in the program"
        )


def spread(table: Tensor, own: tuple[int, ...], symbols: tuple[int, ...]) -> Tensor:
    """A table with a dimension for each of ``symbols``, of which it has its own."""
    if own == symbols:
        return table
    sizes = iter(table.shape)
    found = [next(sizes) if symbol in own else 1 for symbol in symbols]
    return table.reshape(*found, *sizes)


def by_symbols(
    table: Tensor, symbols: Mapping[int, int], event_dim: int = 0
) -> tuple[Tensor, tuple[int, ...]]:
    """A tensor by position, (*enumerated, *batch, *event), with a dimension for each of its symbols
    in their order, then ``ROOM`` of its batch, then its event; and these symbols."""
    rank = table.dim() - event_dim
    if rank < ROOM:
        table = table.reshape((1,) * (ROOM - rank) + table.shape)
        rank = ROOM
    batch, event = table.shape[:rank], table.shape[rank:]
    dims = {s: rank + dim for dim, s in symbols.items() if -dim <= rank and batch[dim] > 1}
    found = tuple(sorted(dims))
    order = [dims[symbol] for symbol in found]
    if order != list(range(rank - ROOM)):
        ones = [dim for dim in range(rank - ROOM) if dim not in order]
        rest = range(rank - ROOM, table.dim())
        sizes = [batch[dim] for dim in order] + [*batch[rank - ROOM :], *event]
        if order + ones != list(range(rank - ROOM)):
            table = table.permute(*order, *ones, *rest)
        table = table.reshape(sizes)
    return table, found


def at_values(
    table: Tensor, symbols: Sequence[int], drawn: Mapping[int, Tensor], event_dim: int = 0
) -> Tensor:
    """A table by symbols at indices of some of them, each (*ROOM dims)."""
    for place in reversed(range(len(symbols))):
        if symbols[place] not in drawn:
            continue
        index = drawn[symbols[place]]
        index = index.reshape((*index.shape, *(1,) * event_dim))
        table = table.movedim(place, 0)
        shape = torch.broadcast_shapes(table.shape[1:], index.shape)
        table = table.expand(table.shape[:1] + shape)
        table = table.gather(0, index.expand(shape)[None])[0]
    return table

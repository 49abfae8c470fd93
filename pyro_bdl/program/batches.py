"""Data for a pass: one batch, or an iterable of batches.

The tensors among a program's arguments are data, with a row for each datum along their first axis;
what is not, such as class weights or inducing points, the program holds itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.utils.collectives import Ranks
from pyro_bdl.utils.trees import tree_leaves, tree_map

Batch = tuple[tuple, dict[str, Any]]
# what programs raise that cannot run on fewer rows than they were written for
NOT_ON_SOME = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
_FORMS = "pass one batch as a tuple (x, y), and several as a list [(x, y), ...]"


class Batches:
    """The arguments of a program in batches, which can be iterated over several times.

    :param data: one batch: a tuple ``(x, y)`` of arguments, which may be dicts or tuples
        themselves, a dict of keyword arguments, or one tensor; or an iterable of batches (a list, a
        ``DataLoader``). An iterator is read once and stored.
    :raises ValueError: if there is no batch; for a tuple of tuples or a list of tensors, which
        could be either.
    """

    ranks: Ranks | None = None  # processes with the other data, see distributed.Shard

    def __init__(self, data: Any) -> None:
        self.source: Iterable[Any]
        if isinstance(data, Batches):
            self.source, self.ranks = data.source, data.ranks
        elif isinstance(data, Tensor | Mapping) or (isinstance(data, tuple) and data):
            self.source = [data]
            if isinstance(data, tuple) and all(map(_holds_tensors, data)):
                raise ValueError(f"data is a tuple of tuples: {_FORMS}")
        elif isinstance(data, Iterator):
            self.source = list(data)
        elif isinstance(data, Iterable) and _package(data) not in ("numpy", "pandas"):
            self.source = data
            if isinstance(data, list) and any(isinstance(part, Tensor) for part in data):
                raise ValueError(f"data is a list of tensors: {_FORMS}")
        else:
            raise TypeError(
                "data must be the program's arguments, such as (x, y), or an iterable of such "
                f"batches, of tensors, got {type(data).__name__}"
            )

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over all batches.

        :raises TypeError: for a ``Shard``, which holds only one rank's part of the data.
        """
        if self.ranks is not None:
            raise TypeError(
                "a Shard holds one rank's part of the data, and all of them are needed here: pass "
                "the data themselves"
            )
        return self.part()

    def part(self) -> Iterator[Batch]:
        """The batches of this process. Callers that sum over them must call ``add_up``."""
        empty = True
        for batch in self.source:
            empty = False
            yield _arguments(batch)
        if empty:
            raise ValueError(
                "data holds no batch: pass (x, y) or an iterable of such batches; [()] for a "
                "program without arguments"
            )

    def first(self) -> Batch:
        return next(self.part())

    def check_same(self, name: str, value: Tensor) -> None:
        """Check that all processes with a part of the data have the same value.

        :raises RuntimeError: if the values differ.
        """
        if self.ranks is not None:
            self.ranks.check_same({name: value})

    def together(self, function: Callable[[], Any]) -> Any:
        """Call a function that passes over the data; an error in one process is raised in all of
        them."""
        return function() if self.ranks is None else self.ranks.together(function)

    def add_up(self, *tensors: Tensor) -> None:
        """Turn sums over this process's part of the data into sums over all data, in place."""
        if self.ranks is not None:
            self.ranks.add_up(tensors)


def _holds_tensors(part: Any) -> bool:
    return isinstance(part, tuple | list) and any(isinstance(value, Tensor) for value in part)


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _arguments(batch: Any) -> Batch:
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), as_dicts(batch)
    if isinstance(batch, tuple | list):
        return tuple(map(as_dicts, batch)), {}
    raise TypeError(
        f"a batch must be the program's arguments, such as (x, y), got {type(batch).__name__}"
    )


def as_dicts(value: Any) -> Any:
    """An argument whose mappings, such as the ``BatchEncoding`` of a tokenizer, are dicts."""
    if isinstance(value, Mapping):
        return {key: as_dicts(part) for key, part in value.items()}
    return value


def taken(value: Any, rows: slice | Tensor) -> Any:
    """Some rows of an argument: of a tensor, or of all tensors in a dict or a tuple.

    :raises ValueError: if they have different numbers of rows.
    """
    value = as_dicts(value)
    count = leading_size(value)

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        if len(leaf) != count:
            raise ValueError(
                f"an argument has {len(leaf)} rows beside one of {count}, and some rows are to be "
                "taken: tensors among the arguments are data; what is not, such as class weights, "
                "let the program hold (as a buffer or a closure)"
            )
        return leaf[rows]

    return tree_map(part, value)


def device_of_rows(value: Any) -> torch.device:
    """The device of the first tensor of an argument; the CPU where it has none."""
    leaves = (leaf for leaf in tree_leaves(as_dicts(value)) if isinstance(leaf, Tensor))
    return next((leaf.device for leaf in leaves), torch.device("cpu"))


def leading_size(batch: Any) -> int:
    """The number of rows of the first tensor among arguments; 0 where it has none."""
    leaves = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    return next((len(leaf) if leaf.dim() else 0 for leaf in leaves), 0)


def has_rows(batch: Batch, num_data: int) -> bool:
    """Return whether every tensor among the arguments has ``num_data`` rows."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(t.dim() > 0 and len(t) == num_data for t in tensors)

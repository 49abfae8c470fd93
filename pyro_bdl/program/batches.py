"""Data for a pass: one batch, or an iterable of batches.

The tensors among a program's arguments are data, with a row for each datum along their first axis;
what is not, such as class weights or inducing points, the program holds itself.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pyro_bdl.errors import ArgumentError, warn
from pyro_bdl.utils.collectives import Ranks
from pyro_bdl.utils.random_state import set_torch_states, torch_states
from pyro_bdl.utils.trees import (
    constants_of,
    is_record,
    tensors_in,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

Batch = tuple[tuple, dict[str, Any]]
# what programs raise that cannot run on fewer rows than they were written for
NOT_ON_SOME = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
_FORMS = "pass one batch as a tuple (x, y), and several as a list [(x, y), ...]"


class Batches:
    """The arguments of a program in batches, which can be iterated over several times.

    Data are one batch: a tuple ``(x, y)`` of arguments, which may be nested themselves (dicts,
    tuples, whatever is registered as a pytree), a dict of keyword arguments, one tensor, or one
    graph of torch_geometric. Or they are many batches that are read when they are
    needed: a list, a ``DataLoader``, any other iterable, or a function that makes an iterator for
    each pass.

    Tensors are read as numbers: no gradient goes back to what they were computed from.

    :param data: of one of these kinds.
    :raises ValueError: if there is no batch; for a tuple of tuples or a list of tensors, which
        could be either.
    :raises TypeError: for an iterator, which can be read once, and a data set of single rows.
    """

    ranks: Ranks | None = None  # processes with the other data, see distributed.Shard
    device: torch.device | None = None  # that batches are moved to

    def __init__(self, data: Any) -> None:
        self.source: Iterable[Any]
        self._first: Batch | None = None
        if isinstance(data, Batches):
            self.source, self.ranks, self.device = data.source, data.ranks, data.device
            self._first = data._first
        elif isinstance(data, Tensor) or is_record(data) or (isinstance(data, tuple) and data):
            self.source = [data]
            if isinstance(data, tuple) and all(map(_holds_tensors, data)):
                raise ValueError(f"data is a tuple of tuples: {_FORMS}")
        elif isinstance(data, Dataset) and not isinstance(data, Iterable):
            raise TypeError(
                f"data is a data set ({type(data).__name__}), whose items are single rows: pass "
                "batches of them, DataLoader(dataset, batch_size=...)"
            )
        elif isinstance(data, Iterator):
            raise TypeError(
                f"data is an iterator ({type(data).__name__}), which ends after one pass: pass "
                "what it is made of, such as the list or the DataLoader, or a function that makes "
                "a new one for each pass"
            )
        elif isinstance(data, Iterable) and _package(data) not in ("numpy", "pandas"):
            self.source = data
            if isinstance(data, list) and any(isinstance(part, Tensor) for part in data):
                raise ValueError(f"data is a list of tensors: {_FORMS}")
        elif callable(data):
            self.source = _Made(data)
        else:
            raise TypeError(
                "data must be the program's arguments, such as (x, y), or an iterable of such "
                f"batches, of tensors, got {type(data).__name__}"
            )

    @classmethod
    def of(cls, args: tuple, device: torch.device | None = None) -> "Batches":
        """The data of a call that takes a program's arguments, ``x, y``, or in their place one
        thing that holds them: a tuple ``(x, y)``, a loader, or another kind of ``Batches``.

        :param device: that batches are moved to; None to leave them where they are.
        """
        batches = cls(args[0]) if len(args) == 1 and holds_batches(args[0]) else cls([args])
        return batches.to(device)

    def to(self, device: torch.device | None) -> "Batches":
        """The same data, whose batches are moved to a device where they are read."""
        moved = Batches(self)
        if device is not None and device != self.device:
            moved.device, moved._first = device, None
        return moved

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
            yield numbers_on(self.device, _arguments(batch))
        if empty and self._first is not None:
            raise ValueError(
                "data held batches in the first pass and none in a later one: pass something that "
                "starts anew each time it is iterated over, or a function that makes it"
            )
        if empty:
            raise ValueError(
                "data holds no batch: pass (x, y) or an iterable of such batches; [()] for a "
                "program without arguments"
            )

    def first(self) -> Batch:
        """The first batch, read once."""
        if self._first is None:
            self._first = next(self.part())
        return self._first

    @property
    def whole(self) -> tuple | None:
        """The arguments with all data, in memory; None where these come in batches or by name."""
        if not isinstance(self.source, list) or len(self.source) != 1:
            return None
        args, kwargs = self.first()
        return None if kwargs else args

    @property
    def is_single(self) -> bool:
        """True if one batch holds all data."""
        if isinstance(self.source, Sized):
            with suppress(TypeError):  # a loader over an iterable that has no length
                return len(self.source) == 1
        return len(list(itertools.islice(self.part(), 2))) == 1

    def shares_with(self, other: "Batches") -> bool:
        """Return whether both read one list or loader, or hold a batch of the same tensors in
        memory."""
        if self.source is other.source:
            return isinstance(self.source, Sized)
        own, others = ({*_memories(data.source)} for data in (self, other))
        return not own.isdisjoint(others)

    @property
    def num_data(self) -> int | None:
        """The number of all data as far as it is declared: the rows of ``whole``, or the length of
        a loader's sampler or data set."""
        if self.whole is not None:
            return leading_size(self.whole)
        for name in ("sampler", "dataset"):
            with suppress(TypeError):
                return len(getattr(self.source, name, None))  # type: ignore[arg-type]
        return None

    def parts(self, size: int) -> Iterator[Batch]:
        """All data in their order, each once: parts of at most so many rows of what is in memory,
        or else the batches as they come."""
        whole = self.whole
        if whole is None or leading_size(whole) <= size:
            yield from self
            return
        for rows in torch.arange(leading_size(whole), device=device_of_rows(whole)).split(size):
            yield select_rows((whole, {}), rows)

    def joined(self) -> Batch:
        """All batches as one, in memory.

        :raises ValueError: for batches of different structure.
        """
        flat = [tree_flatten(batch) for batch in self]
        leaves, structures = zip(*flat, strict=True)
        if any(structure != structures[0] for structure in structures):
            raise ValueError("the batches of data are of different structure: pass like ones")
        columns = zip(*leaves, strict=True)
        return tree_unflatten([_stacked(column) for column in columns], structures[0])

    def check_same(self, name: str, value: Tensor) -> None:
        """Check that all processes with a part of the data have the same value.

        :raises RuntimeError: if the values differ.
        """
        if self.ranks is not None:
            self.ranks.check_same({name: value})

    def on_all_ranks(self, function: Callable[[], Any]) -> Any:
        """Call a function that passes over the data; an error in one process is raised in all of
        them."""
        return function() if self.ranks is None else self.ranks.on_all_ranks(function)

    def add_up(self, *tensors: Tensor) -> None:
        """Turn sums over this process's part of the data into sums over all data, in place."""
        if self.ranks is not None:
            self.ranks.add_up(tensors)


class Stream:
    """Batch after batch without end, pass after pass, which can go on from a stored place.

    The place is the random state before the pass and the number of its batches that were taken, so
    that a pass is made again up to there. It is a part for ``Checkpoint``.

    :param one_pass: makes the batches of a pass; it may draw random numbers of torch.
    :param stated: the number of all data that the program states, with which that of the first
        pass is compared; None for no comparison.
    """

    def __init__(
        self, one_pass: Callable[[], Iterator[Batch]], *, stated: int | None = None
    ) -> None:
        self._one_pass, self.stated = one_pass, stated
        self.taken = self.passes = self._rows = 0
        self._before: Mapping[str, Tensor] = {}
        self._pass: Iterator[Batch] = iter(())

    def next(self) -> Batch:
        """The next batch."""
        batch = next(self._pass, None)
        if batch is None:
            self._compare()
            self._begin(torch_states())
            self.passes += 1
            batch = next(self._pass)
            self._size = leading_size(batch)
        self.taken += 1
        self._rows += leading_size(batch)
        return batch

    def _begin(self, before: Mapping[str, Tensor]) -> None:
        self._pass, self._before, self.taken, self._rows = self._one_pass(), before, 0, 0

    def _compare(self) -> None:
        """Warn if the first pass held another number of data than the program states.

        A pass may only leave out a last batch that is not full.
        """
        stated, rows = self.stated, self._rows
        if stated is not None and self.passes == 1 and not stated - self._size < rows <= stated:
            warn(
                f"the program states {stated} data, but a pass over the batches holds {rows}: "
                f"the likelihood is scaled to {stated} data; give the program the number of all "
                "data as its num_data",
                "number-of-data",
            )

    def state_dict(self) -> dict[str, Any]:
        """The place: the pass, the batches taken in it, and the random state before it."""
        return {"passes": self.passes, "taken": self.taken, "before": self._before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place; torch's generators are left as they are there, within that pass."""
        if not state["passes"]:
            return
        set_torch_states(state["before"])
        self._begin(state["before"])
        self.passes = state["passes"]
        for _ in range(state["taken"]):
            batch = next(self._pass)
            self._size = self._size if self.taken else leading_size(batch)
            self.taken += 1
            self._rows += leading_size(batch)


@dataclass(frozen=True)
class _Made:
    """An iterable that a function makes anew for each pass."""

    make: Callable[[], Iterable[Any]]

    def __iter__(self) -> Iterator[Any]:
        made = self.make()
        return made if isinstance(made, Iterator) else iter(Batches(made).source)


def numbers_on(device: torch.device | None, batch: Batch) -> Batch:
    """A batch with its tensors as numbers on a device, or where they are for None."""
    return tree_map(lambda leaf: _numbers(leaf, device), batch)


def _numbers(leaf: Any, device: torch.device | None) -> Any:
    if not isinstance(leaf, Tensor):  # a graph of torch_geometric moves its own tensors, in place
        moves = device is not None and is_record(leaf) and hasattr(leaf, "to")
        return copy.copy(leaf).to(device) if moves else leaf
    if leaf.is_inference():  # of which none may be in a graph of autograd
        leaf = leaf.clone()
    leaf = leaf.detach() if leaf.requires_grad else leaf
    if device is None or leaf.device == device:
        return leaf
    if leaf.is_meta:
        raise ArgumentError(
            f"a tensor {tuple(leaf.shape)} of the data is on the meta device and holds no numbers: "
            "pass one that does"
        )
    return leaf.to(device, non_blocking=leaf.device.type == "cpu" and leaf.is_pinned())


def _memories(source: Any) -> Iterator[tuple]:
    """Yield what identifies the arguments of each batch in a list: memory and constants."""
    for batch in source if isinstance(source, list) else ():
        leaves = tree_leaves(_arguments(batch))
        tensors = tensors_in(leaves)
        if tensors and all(t.layout is torch.strided and t.numel() for t in tensors):
            places = tuple((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors)
            yield places, constants_of(leaves)


def _stacked(parts: tuple[Any, ...]) -> Any:
    """The rows of a tensor in all batches; of what has no rows that of the first batch."""
    first = parts[0]
    alone = len(parts) == 1 or not isinstance(first, Tensor) or not first.dim()
    return first if alone else torch.cat(parts)


def holds_batches(value: Any) -> bool:
    """Return whether one argument is no argument of the program, but data that hold them."""
    if isinstance(value, Batches | tuple | Dataset):
        return True
    if isinstance(value, Tensor | str) or _package(value) in ("numpy", "pandas"):
        return False
    if is_record(value):  # dicts, and graphs of torch_geometric, which are iterable too
        return False
    if isinstance(value, list):
        return not (value and _is_numbers(value))
    return isinstance(value, Iterable) or callable(value)


def _is_numbers(value: Any) -> bool:
    """Return whether a list is one of numbers, however deep."""
    return isinstance(value, list) and all(
        isinstance(part, int | float) or _is_numbers(part) for part in value
    )


def _holds_tensors(part: Any) -> bool:
    return isinstance(part, tuple | list) and any(isinstance(value, Tensor) for value in part)


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _arguments(batch: Any) -> Batch:
    if isinstance(batch, Tensor) or (is_record(batch) and not isinstance(batch, Mapping)):
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


def select_rows(value: Any, rows: slice | Tensor) -> Any:
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
        if leaf.layout is not torch.strided:
            numbers = torch.arange(count, device=leaf.device)[rows]
            return leaf.to_sparse_coo().index_select(0, numbers)
        return leaf[rows]

    return tree_map(part, value)


def device_of_rows(value: Any) -> torch.device:
    """The device of the first tensor of an argument; the CPU where it has none."""
    leaves = tensors_in(as_dicts(value))
    return next((leaf.device for leaf in leaves), torch.device("cpu"))


def leading_size(batch: Any) -> int:
    """The number of rows of the first tensor among arguments; 0 where it has none."""
    leaves = tensors_in(batch)
    return next((len(leaf) if leaf.dim() else 0 for leaf in leaves), 0)


def has_rows(batch: Batch, num_data: int) -> bool:
    """Return whether every tensor among the arguments has ``num_data`` rows."""
    tensors = tensors_in(batch)
    return bool(tensors) and all(t.dim() > 0 and len(t) == num_data for t in tensors)

"""Evaluation of a function at many draws, or at single rows of data: by ``vmap``, or one by one.

A program runs on a row x[n:n+1], with plates of size one, under ``vmap`` over n. Inside, no tensor
has an axis that numbers the data, wherever the network puts it, so that none can be mistaken.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.errors import UnsupportedProgramError, warn
from pyro_bdl.program.batch_norm import (
    BatchStatistics,
    leaving_running_statistics,
    update_running_statistics,
)
from pyro_bdl.program.batches import as_dicts, leading_size
from pyro_bdl.utils.autograd import is_mapped
from pyro_bdl.utils.memory import Allocations, keep_freed_blocks, require_memory
from pyro_bdl.utils.module_state import Modules, vmappable
from pyro_bdl.utils.trees import tensors_in, tree_flatten, tree_leaves, tree_map, tree_unflatten

Draws = dict[str, Tensor]


def number_of_draws(draws: Draws) -> int:
    return next(iter(draws.values())).shape[0]


def is_shared(values: Tensor) -> bool:
    """Return whether all draws are one value in memory, as ``Tensor.expand`` makes them."""
    return len(values) > 1 and values.stride(0) == 0


def joined(parts: Iterable[tuple[int, Any]], total: int) -> Any:
    """Put trees of tensors together along their leading axis, one after the other.

    :param parts: each part's length and tree.
    :param total: the sum of the lengths.
    """
    result, start = None, 0
    for count, part in parts:
        if count == total:
            return part
        if result is None:
            _require_room(part, count, total)
            result = tree_map(lambda leaf: leaf.new_empty(total, *leaf.shape[1:]), part)
        for whole, leaf in zip(tree_leaves(result), tree_leaves(part), strict=True):
            whole[start : start + count] = leaf
        start += count
    return result


def _require_room(part: Any, count: int, total: int) -> None:
    """Check that the results of all draws fit in memory.

    :param part: those of ``count`` of them.
    :raises MemoryError: if they do not.
    """
    leaves = tensors_in(part)
    if leaves:
        each = sum(leaf.numel() * leaf.element_size() for leaf in leaves) / max(1, count)
        what = f"the results of {total} draws or rows need"
        require_memory(each * total, leaves[0].device, what, "take fewer at once (num_samples)")


class DrawMap:
    """Map over draws that stacks function(draw), with different random numbers for each draw.

    It uses ``vmap`` for chunks of several draws. Latents that all draws share are no inputs of it,
    so that what depends on them alone is computed once for a chunk. If ``vmap`` raises a
    ``RuntimeError``, as for an operator without a batching rule, and a loop over the draws does
    not, it warns once and loops from then on; after a lack of memory only that once. BatchNorm
    layers in training mode update their
    running statistics as in a loop. A map is for one program.

    :param over: what there are several of, for that message.
    :param modules: the program's modules as far as they are known, where it may run in training
        mode; runs add those that they call.
    """

    def __init__(self, *, over: str = "draws", modules: Modules | None = None) -> None:
        self.over, self.modules = over, modules
        self._loops, self._shares = False, True

    def __call__(
        self,
        function: Callable[[Draws], Any],
        draws: Draws,
        *,
        chunk_size: int | None = None,
        finish: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Stack function(draw) over the leading axis of ``draws``.

        :param chunk_size: the number of draws evaluated at once; by default all.
        :param finish: a function of each chunk's stacked results, applied outside ``vmap``.
        """
        total = number_of_draws(draws)
        chunk_size = min(chunk_size or total, total)
        if chunk_size < total:
            keep_freed_blocks()

        def chunks() -> Iterator[tuple[int, Any]]:
            for start in range(0, total, chunk_size):
                chunk = {name: value[start : start + chunk_size] for name, value in draws.items()}
                part = self._chunk(function, chunk)
                yield number_of_draws(chunk), part if finish is None else finish(part)

        return joined(chunks(), total)

    def _chunk(self, function: Callable[[Draws], Any], draws: Draws) -> Any:
        # vmap gains nothing with one draw, and batched convolutions are slower
        if self._loops or number_of_draws(draws) == 1:
            return looped(function, draws)
        in_training = self.modules is not None and not torch.compiler.is_compiling()
        while True:
            fixed = {n: v[0] for n, v in draws.items() if self._shares and is_shared(v)}
            varying = {name: value for name, value in draws.items() if name not in fixed}
            at = functools.partial(_with_fixed, function, fixed)
            try:
                if in_training:
                    return _vmapped_with_batch_norm(
                        self.modules, at, varying, number_of_draws(draws)
                    )
                return _vmapped(at, varying, number_of_draws(draws))
            except RuntimeError as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                subject = next(iter(getattr(error, "__notes__", ())), "the network")
                again = not isinstance(error, torch.OutOfMemoryError)
            if not (fixed and again):
                break
            self._shares = False  # such as an update in place of what all draws share
        result = looped(function, draws)  # which raises what is wrong without vmap too
        warn(
            f"{subject} cannot be vectorized over {self.over}, which are taken one by one instead: "
            f"{reason}",
            "one-by-one",
        )
        self._loops = again
        return result


def map_draws(function: Callable[[Draws], Any], draws: Draws, **options: Any) -> Any:
    """Evaluate one function by a new ``DrawMap``."""
    return DrawMap()(function, draws, **options)


def _with_fixed(function: Callable[[Draws], Any], fixed: Draws, draw: Draws) -> Any:
    return function(fixed | draw)


def _vmapped(function: Callable[[Draws], Any], draws: Draws, count: int) -> Any:
    lanes = torch.zeros(count, device="cpu")  # there may be no draws
    with vmappable():
        result = torch.vmap(lambda lane, draw: function(draw), randomness="different")(lanes, draws)
    return tree_map(lambda leaf: leaf.clone() if is_shared(leaf) else leaf, result)


def _vmapped_with_batch_norm(
    modules: Modules | None, function: Callable[[Draws], Any], draws: Draws, count: int
) -> Any:
    layers: list[Any] = []

    def evaluate(draw: Draws) -> tuple:
        with leaving_running_statistics(modules) as calls:
            result = function(draw)
        layers[:] = [call.layer for call in calls]
        return result, [(call.mean, call.variance) for call in calls]

    result, statistics = _vmapped(evaluate, draws, count)
    pairs = zip(layers, statistics, strict=True)
    update_running_statistics([BatchStatistics(layer, *values) for layer, values in pairs])
    return result


def looped(function: Callable[[Draws], Any], draws: Draws) -> Any:
    """Stack function(draw) over draws, taken one after another."""
    results = [
        tree_flatten(function({name: value[i] for name, value in draws.items()}))
        for i in range(number_of_draws(draws))
    ]
    if len(results) == 1:  # views, which are still the same tensors
        leaves, structure = results[0]
        return tree_unflatten([leaf[None] for leaf in leaves], structure)
    columns = zip(*(leaves for leaves, _ in results), strict=True)
    return tree_unflatten([torch.stack(column) for column in columns], results[0][1])


def measured(function: Callable[[Draws], Any], draws: Draws) -> tuple[int, Any]:
    """Return function(first draw), and the bytes of the tensors that it allocated."""
    with Allocations() as allocations:
        result = function({name: value[0] for name, value in draws.items()})
    return max(1, allocations.bytes), result


def bytes_of_another(function: Callable[[Draws], Any], draws: Draws, of_one: int) -> int:
    """The bytes of the tensors that a further draw adds to ``of_one`` of the first."""
    if not any(map(is_shared, draws.values())):
        return of_one
    with Allocations() as allocations:
        DrawMap()(function, {name: value[:2] for name, value in draws.items()})
    return max(1, allocations.bytes - of_one)


class RowMap:
    """Map over single rows that stacks function(args, kwargs, lane), each with its own random
    numbers.

    Every tensor among the arguments with as many rows as the first one is cut; a row keeps its
    leading axis, of length one. ``lane`` is a number of each row, for ``attach_row``. Where an
    operation has no batching rule, as torch's recurrent layers, the rows are taken in a loop, with
    a warning.
    """

    def __init__(self) -> None:
        self._map = DrawMap(over="data")

    def __call__(
        self,
        function: Callable[[tuple, dict[str, Any], Tensor], Any],
        args: tuple,
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Stack the results of all rows.

        :raises UnsupportedProgramError: if no argument is a tensor with rows.
        """
        leaves, spec = tree_flatten((tuple(map(as_dicts, args)), as_dicts(kwargs)))
        count = leading_size(leaves)
        cut = {
            number: leaf
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == count
        }
        if not cut:
            raise UnsupportedProgramError(
                "the rows of data can be taken one by one only where they are arguments of the "
                "program: pass them as tensors (N, ...)"
            )

        def of_row(row: dict[str, Tensor]) -> Any:
            inputs = [row[f"<{i}>"][None] if i in cut else leaf for i, leaf in enumerate(leaves)]
            own_args, own_kwargs = tree_unflatten(inputs, spec)
            return function(own_args, own_kwargs, row["lane"])

        rows = {f"<{number}>": leaf for number, leaf in cut.items()}
        lanes = torch.zeros(count, device=next(iter(cut.values())).device)
        return self._map(of_row, {**rows, "lane": lanes})


class InsideAnotherMapError(Exception):
    """A tensor is in a ``torch.vmap`` or ``torch.func.jvp`` of the program's own, and has no value
    outside of it."""


class _OutsideOfMap:
    """A tensor of a map over rows as it is outside of the map, the tensor that holds it there, and
    whether it differs from row to row by its operators."""

    value: Tensor | None = None
    held: Tensor | None = None
    depends = False


class _Tap(torch.autograd.Function):
    """The identity, whose results outside of a map over rows are (n, *shape)."""

    @staticmethod
    def forward(value: Tensor, lane: Tensor, outside: _OutsideOfMap, copied: bool) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        return gradient, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        raise InsideAnotherMapError

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any, in_dims: tuple, value: Tensor, lane: Tensor, outside: _OutsideOfMap, copied: bool
    ) -> tuple[Tensor, int]:
        if in_dims[1] is None:  # the innermost map is another one
            raise InsideAnotherMapError
        if in_dims[0] is None:
            rows = value.expand(info.batch_size, *value.shape)
        else:
            rows = value.movedim(in_dims[0], 0)
        outside.depends, outside.held = in_dims[0] is not None, value
        outside.value = rows.clone() if copied else rows  # no view, which could change in place
        return outside.value, 0


def attach_row(value: Tensor, lane: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return an equal tensor, to go on with in a map over rows, and the same tensor as it is
    outside of the map, (n, *shape): gradients in it are those of each row.

    :param lane: the row's, see ``RowMap``; None outside of maps. Where the rows are taken in a
        loop, both tensors are the same.
    :raises InsideAnotherMapError: for a tensor in a ``torch.vmap`` of the program's own.
    """
    if lane is None or not is_mapped():
        result = value.clone()
        return result, result
    outside = _OutsideOfMap()
    result = _Tap.apply(value, lane, outside, True)
    return result, result if outside.value is None else outside.value


def without_map(value: Tensor, lane: Tensor | None) -> Tensor:
    """The tensor that holds a tensor of a map over rows for all of them, with its graph; outside of
    maps, the tensor itself."""
    held = None if lane is None else _outside(value, lane).held
    return value if held is None else held


def depends_on_row(value: Tensor, lane: Tensor) -> bool:
    """Return whether a tensor of a map over rows is computed from the row, whatever its numbers;
    False where the rows are taken in a loop."""
    return _outside(value, lane).depends


def _outside(value: Tensor, lane: Tensor) -> _OutsideOfMap:
    outside = _OutsideOfMap()
    _Tap.apply(value, lane, outside, False)
    return outside

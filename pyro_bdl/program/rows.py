"""The rows of a program's arguments, one at a time.

A program runs on x[n:n+1], with plates of size one, under ``vmap`` over n. Inside, no tensor has an
axis that numbers the data, wherever the network puts it, so that none can be mistaken.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.batches import as_dicts, leading_size
from pyro_bdl.program.vmap import DrawMap
from pyro_bdl.utils.trees import tree_flatten, tree_unflatten


class RowMap:
    """Map over single rows that stacks function(args, kwargs, lane), each with its own random
    numbers.

    Every tensor among the arguments with as many rows as the first one is cut; a row keeps its
    leading axis, of length one. ``lane`` is a number of each row, for ``tap``. Where an operation
    has no batching rule, as torch's recurrent layers, the rows are taken in a loop, with a warning.
    """

    def __init__(self) -> None:
        self._map = DrawMap(over="data", batch_norm=False)

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


class _Outside:
    """A tensor of a map over rows as it is outside of the map."""

    value: Tensor | None = None


class _Tap(torch.autograd.Function):
    """The identity, whose results outside of a map over rows are (n, *shape)."""

    @staticmethod
    def forward(value: Tensor, lane: Tensor, outside: _Outside, copied: bool) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        return gradient, None, None, None

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any, in_dims: tuple, value: Tensor, lane: Tensor, outside: _Outside, copied: bool
    ) -> tuple[Tensor, int]:
        if in_dims[0] is None:
            rows = value.expand(info.batch_size, *value.shape)
        else:
            rows = value.movedim(in_dims[0], 0)
        outside.value = rows.clone() if copied else rows  # no view, which could change in place
        return outside.value, 0


def tap(value: Tensor, lane: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return an equal tensor, to go on with in a map over rows, and the same tensor as it is
    outside of the map, (n, *shape): gradients in it are those of each row.

    :param lane: the row's, see ``RowMap``; None outside of maps. Where the rows are taken in a
        loop, both tensors are the same.
    """
    if lane is None:
        result = value.clone()
        return result, result
    outside = _Outside()
    result = _Tap.apply(value, lane, outside, True)
    return result, result if outside.value is None else outside.value


def with_rows(value: Tensor, lane: Tensor | None) -> Tensor:
    """A tensor of a map over rows as it is outside of the map, (n, *shape), without a graph."""
    if lane is None:
        return value
    outside = _Outside()
    result = _Tap.apply(value.detach(), lane, outside, False)
    return result if outside.value is None else outside.value

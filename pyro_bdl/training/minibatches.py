"""Minibatches of the rows of the data, with a position that can be saved."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.program.batches import device_of_rows, leading_size, taken
from pyro_bdl.utils.validation import whole_number


class Minibatches:
    """Minibatches without end; each pass over the rows is in a new random order.

    Incomplete batches at the end of a pass are left out. It is a part for ``Checkpoint``.

    :param rows: N.
    :param size: rows in each batch; N or more for all rows at once, in their order.
    :param device: of the indices.
    """

    def __init__(self, rows: int, size: int, *, device: torch.device | str = "cpu") -> None:
        self.rows, self.size = whole_number(rows, "rows"), whole_number(size, "size")
        self.device = torch.device(device)
        self._order: Tensor | None = None
        self._position = 0

    def __iter__(self) -> Iterator[Tensor | None]:
        """Yield the indices (size,) of each batch; None for all rows."""
        while True:
            yield self.next()

    def next(self) -> Tensor | None:
        """The indices of the next batch; None for all rows."""
        if self.size >= self.rows:
            return None
        if self._order is None or self._position + self.size > self.rows:
            self._order, self._position = torch.randperm(self.rows, device=self.device), 0
        start = self._position
        self._position += self.size
        return self._order[start : self._position]

    def of(self, x: Any, y: Any) -> tuple[Any, Any]:
        """The rows of the next batch."""
        rows = self.next()
        return (x, y) if rows is None else (taken(x, rows), taken(y, rows))

    def state_dict(self) -> dict[str, Any]:
        """The present order and the position in it."""
        return {"rows": self.rows, "order": self._order, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken.

        :raises RuntimeError: for a state of other data.
        """
        if state["rows"] != self.rows:
            raise RuntimeError(
                f"the checkpoint is of {state['rows']} rows of data, and these are {self.rows}"
            )
        order = state["order"]
        self._order = None if order is None else order.to(self.device)
        self._position = state["position"]


def minibatches(x: Any, y: Any, size: int, steps: int) -> Iterator[tuple[Any, Any]]:
    """The rows of each of ``steps`` steps."""
    batches = Minibatches(leading_size(x), size, device=device_of_rows(x))
    for _ in range(steps):
        yield batches.of(x, y)

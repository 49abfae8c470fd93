"""An endless stream of minibatches, and checks that the program scales their likelihood by N/B."""

import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.fisher import check_scales, num_data
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.program.batches import Batch, Batches, has_rows, leading_size
from pyro_bdl.program.program import Program
from pyro_bdl.utils.random_state import set_torch_states, torch_states
from pyro_bdl.utils.trees import tree_leaves, tree_map


class MinibatchSource:
    """Passes over a program's arguments, batch after batch.

    :param data: ``(x, y)`` or an iterable of such batches, as in ``Batches``; an iterable is
        iterated over again and again.
    :param batch_size: rows of each batch of ``(x, y)``, in a new order on every pass; rows that do
        not fill a batch are left out. None for all rows.
    :raises ValueError: for a ``batch_size`` below 1, a ``batch_size`` with an iterable or with
        tensors of different lengths, or data without a batch.
    """

    def __init__(self, data: Any, batch_size: int | None = None) -> None:
        self.source = Batches(data)
        some = list(itertools.islice(self.source, 2))
        self.first = some[0]
        self.is_whole = len(some) == 1  # every batch holds all data
        self.num_rows: int | None = None  # the number of all data, if known
        self.stated: int | None = None  # the number of all data according to the program
        self.size = leading_size(self.first)
        if self.is_whole:
            self.num_rows = self.size
        if batch_size is not None:
            self._split(batch_size)

    def _split(self, batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if not self.is_whole:
            raise ValueError(
                "batch_size is for data given as (x, y); the batches of an iterable have their own"
            )
        if batch_size >= self.size:
            return
        if not has_rows(self.first, self.size):
            raise ValueError(
                "batch_size needs tensors that all have a row for each datum: pass an iterable of "
                "batches instead"
            )
        self.size, self.is_whole = batch_size, False
        self.whole = self.first
        self.device = next(v.device for v in tree_leaves(self.whole) if isinstance(v, Tensor))
        self.first = self._rows(torch.arange(batch_size, device=self.device))

    def __iter__(self) -> Iterator[Batch]:
        """Pass after pass without end; ``Stream`` can go on from a stored place."""
        while True:
            yield from self.one_pass()

    def one_pass(self) -> Iterator[Batch]:
        """The batches of one pass over the data; random numbers are drawn at the first of them."""
        if self.is_whole:
            yield self.first
        elif self.num_rows is not None:
            parts = torch.randperm(self.num_rows, device=self.device).split(self.size)
            yield from (self._rows(part) for part in parts if len(part) == self.size)
        else:
            yield from self.source

    def _rows(self, index: Tensor) -> Batch:
        def part(value: Any) -> Any:
            return value[index.to(value.device)] if isinstance(value, Tensor) else value

        args, kwargs = self.whole
        return tree_map(part, args), tree_map(part, kwargs)

    def compare(self, rows: int) -> None:
        """Warn if a pass holds another number of data than the program states.

        A pass may only leave out a last batch that is not full.
        """
        if self.stated is None or self.stated - self.size < rows <= self.stated:
            return
        warnings.warn(
            f"the program states {self.stated} data, but a pass over the batches holds {rows}: the "
            f"likelihood is scaled to {self.stated} data; give the program the number of all data "
            "as its num_data",
            BdlWarning,
            stacklevel=2,
        )

    def check_scale(self, program: Program) -> None:
        """Check that a program, built on the first batch, scales its log likelihood by N/B.

        :raises ValueError: if the program does not know N, or a wrong N.
        :raises UnsupportedProgramError: if there is a latent for each datum, if a discrete site
            stands outside of the data's plate, or if the program chooses its rows itself.
        """
        with torch.no_grad():
            run = program.run(program.initial)
        sites = run.observed
        observed = sites.values()
        rows = max((num_data(site) for site in observed), default=0)
        stated = round(max((num_data(site) * site.subsampling for site in observed), default=0))
        if self.is_whole:
            if stated != rows and stated == self.size:
                raise UnsupportedProgramError(
                    f"the program picks {rows} of the {stated} rows at random in each run: use one "
                    "without subsample_size, and take the rows by batch_size="
                )
            if stated != rows:
                raise ValueError(
                    f"the program states {stated} data, but data is one batch of {rows}: pass "
                    "all of them, (x, y) with batch_size= or an iterable of batches"
                )
            return
        bias = run.bias_of_minibatches()
        if bias is not None:
            raise UnsupportedProgramError(bias)
        for name, latent in program.latents.items():
            if any(plate in program.plates for plate in latent.plates if _is_part(program, plate)):
                raise UnsupportedProgramError(
                    f"the latent site '{name}' is in a plate of which a minibatch holds a "
                    "part: there is one for each datum, which minibatches cannot move; integrate "
                    "it out where it is Gaussian (handlers.integrate), or pass all data at once"
                )
        total = self.num_rows if rows == self.size else None
        known = f"{total}" if total else "the number of all data"
        if stated == rows:
            raise ValueError(
                f"the program treats a minibatch of {rows} rows as all data, so that its log "
                f"likelihood would have too little weight: make it with num_data={known}, or "
                "give its plate that size"
            )
        check_scales(sites)
        if total is not None and stated != total:
            raise ValueError(
                f"the program states {stated} data, but data holds {total}: make it with "
                f"num_data={total}"
            )
        self.stated = stated if rows == self.size else None


class Stream:
    """Pass after pass over minibatches, which can go on from a stored place.

    The place is the random state before the pass and the number of its batches that were taken, so
    that a pass is made again up to there.
    """

    def __init__(self, batches: MinibatchSource) -> None:
        self.batches = batches
        self.passed = self.taken = self._rows = 0
        self._current: Iterator[Batch] = iter(())

    def __next__(self) -> Batch:
        if self.batches.is_whole:
            return self.batches.first
        batch = next(self._current, None)
        if batch is None:
            if self.passed == 1 and self.batches.num_rows is None:
                self.batches.compare(self._rows)
            self._begin(torch_states(), self.passed + 1)
            batch = next(self._current)
        self.taken += 1
        self._rows += leading_size(batch)
        return batch

    def _begin(self, before: Mapping[str, Tensor], number: int) -> None:
        self._current, self._before = self.batches.one_pass(), before
        self.passed, self.taken, self._rows = number, 0, 0

    def place(self) -> dict[str, Tensor]:
        """The place in the stream, by name; empty before the first batch."""
        if not self.passed:
            return {}
        counts = {
            name: torch.tensor(number, device="cpu")
            for name, number in (("passed", self.passed), ("taken", self.taken))
        }
        return counts | {f"before/{name}": value for name, value in self._before.items()}

    def go_to(self, place: Mapping[str, Tensor]) -> None:
        """Go to a place; torch's generators are left as they are there, within that pass."""
        if not place:
            return
        kind = "before/"
        before = {k.removeprefix(kind): v for k, v in place.items() if k.startswith(kind)}
        set_torch_states(before)
        self._begin(before, int(place["passed"]))
        for _ in range(int(place["taken"])):
            next(self)


def _is_part(program: Program, plate: str) -> bool:
    size, present = program.plates[plate]
    return present < size

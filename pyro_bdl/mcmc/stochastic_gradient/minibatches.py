"""An endless stream of minibatches, and checks that the program scales their likelihood by N/B."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.fisher import num_data
from pyro_bdl.errors import UnsupportedProgramError, warn
from pyro_bdl.program.batches import Batch, Batches, device_of_rows, leading_size, taken
from pyro_bdl.program.program import Program
from pyro_bdl.training.descent import stated_data
from pyro_bdl.utils.random_state import set_torch_states, torch_states
from pyro_bdl.utils.validation import whole_number


class MinibatchSource:
    """Passes over a program's arguments, batch after batch.

    :param data: ``(x, y)`` or an iterable of such batches, as in ``Batches``; an iterable is
        iterated over again and again.
    :param batch_size: rows of each batch of ``(x, y)``, in a new order on every pass; rows that do
        not fill a batch are left out. None for all rows.
    :raises ValueError: for a ``batch_size`` with an iterable or with tensors of different lengths,
        or data without a batch.
    """

    def __init__(self, data: Any, batch_size: int | None = None) -> None:
        self.source = Batches(data)
        some = list(itertools.islice(self.source, 2))
        self.first = self.whole = some[0]
        self.is_whole = len(some) == 1  # every batch holds all data
        self.size = leading_size(self.first)
        self.num_rows = self.size if self.is_whole else None  # of all data, if known
        self.stated: int | None = None  # the same according to the program
        if batch_size is None:
            return
        if not self.is_whole:
            raise ValueError(
                "batch_size is for data given as (x, y); the batches of an iterable have their own"
            )
        if whole_number(batch_size, "batch_size") >= self.size:
            return
        self.size, self.is_whole = batch_size, False
        self.first = self._rows(torch.arange(batch_size, device=device_of_rows(self.whole)))

    def one_pass(self) -> Iterator[Batch]:
        """The batches of one pass over the data; random numbers are drawn at the first of them."""
        if self.is_whole:
            yield self.first
        elif self.num_rows is not None:
            order = torch.randperm(self.num_rows, device=device_of_rows(self.whole))
            parts = order.split(self.size)
            yield from (self._rows(part) for part in parts if len(part) == self.size)
        else:
            rows = 0
            for batch in self.source:
                rows += leading_size(batch)
                yield batch
            self._compare(rows)

    def _rows(self, index: Tensor) -> Batch:
        return taken(self.whole, index)

    def _compare(self, rows: int) -> None:
        """Warn if the first pass holds another number of data than the program states.

        A pass may only leave out a last batch that is not full.
        """
        if self.stated is not None and not self.stated - self.size < rows <= self.stated:
            warn(
                f"the program states {self.stated} data, but a pass over the batches holds {rows}: "
                f"the likelihood is scaled to {self.stated} data; give the program the number of "
                "all data as its num_data",
                "number-of-data",
                stacklevel=2,
            )
        self.stated = None

    def check_scale(self, program: Program) -> None:
        """Check that a program, built on the first batch, scales its log likelihood by N/B.

        :raises ValueError: if the program does not know N, or a wrong N.
        :raises UnsupportedProgramError: if there is a latent for each datum, if a discrete site
            stands outside of the data's plate.
        """
        with torch.no_grad():
            run = program.run(program.initial)
        sites = run.observed
        rows = max((num_data(site) for site in sites.values()), default=0)
        if self.is_whole:
            stated = round(max((num_data(s) * s.subsampling for s in sites.values()), default=0))
            if stated != rows:
                raise ValueError(
                    f"the program states {stated} data, but uses {rows} of one batch of "
                    f"{self.size}: pass all of them, (x, y) with batch_size= or an iterable of "
                    "batches, to a program without subsample_size"
                )
            return
        bias = run.bias_of_minibatches()
        if bias is not None:
            raise UnsupportedProgramError(bias)
        parts = {plate for plate, (size, present) in program.plates.items() if present < size}
        for name, latent in program.latents.items():
            if parts & set(latent.plates):
                raise UnsupportedProgramError(
                    f"the latent site '{name}' is in a plate of which a minibatch holds a "
                    "part: there is one for each datum, which minibatches cannot move; integrate "
                    "it out where it is Gaussian (handlers.integrate), or pass all data at once"
                )
        stated = stated_data(sites, self.size, self.num_rows)
        self.stated = stated if rows == self.size else None


class Stream:
    """Pass after pass over minibatches, which can go on from a stored place.

    The place is the random state before the pass and the number of its batches that were taken, so
    that a pass is made again up to there.
    """

    def __init__(self, batches: MinibatchSource) -> None:
        self.batches = batches
        self.taken = 0
        self._before: Mapping[str, Tensor] = {}
        self._pass: Iterator[Batch] = iter(())

    def __next__(self) -> Batch:
        if self.batches.is_whole:
            return self.batches.first
        batch = next(self._pass, None)
        if batch is None:
            self._begin(torch_states())
            batch = next(self._pass)
        self.taken += 1
        return batch

    def _begin(self, before: Mapping[str, Tensor]) -> None:
        self._pass, self._before, self.taken = self.batches.one_pass(), before, 0

    def place(self) -> tuple[int, Mapping[str, Tensor]]:
        """The number of batches taken in this pass, and the random state before it."""
        return self.taken, self._before

    def go_to(self, taken: int, before: Mapping[str, Tensor]) -> None:
        """Go to a place; torch's generators are left as they are there, within that pass."""
        set_torch_states(before)
        self._begin(before)
        for _ in range(taken):
            next(self)

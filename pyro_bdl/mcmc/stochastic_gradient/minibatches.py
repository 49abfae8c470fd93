"""An endless stream of minibatches, and checks that the program scales their likelihood by N/B."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.batches import Batch, Batches, device_of_rows, leading_size, select_rows
from pyro_bdl.program.program import Program
from pyro_bdl.program.rows import plates_of_rows, refuse_local_latents
from pyro_bdl.training.descent import counted, stated_data
from pyro_bdl.utils.validation import whole_number


class MinibatchSource:
    """Passes over a program's arguments, batch after batch.

    :param data: as in ``Batches``.
    :param batch_size: rows of each batch of ``(x, y)``, in a new order on every pass; rows that do
        not fill a batch are left out. None for all rows.
    :raises ValueError: for a ``batch_size`` with an iterable or with tensors of different lengths,
        or data without a batch.
    """

    def __init__(
        self, data: Any, batch_size: int | None = None, *, device: torch.device | None = None
    ) -> None:
        self.source = Batches(data).to(device)
        self.first = self.whole = self.source.first()
        self.is_whole = self.source.is_single  # every batch holds all data
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
        """The batches of one pass over the data, which has no end if each holds all of them;
        random numbers are drawn at the first of them."""
        if self.is_whole:
            yield from itertools.repeat(self.first)
        elif self.num_rows is not None:
            order = torch.randperm(self.num_rows, device=device_of_rows(self.whole))
            parts = order.split(self.size)
            yield from (self._rows(part) for part in parts if len(part) == self.size)
        else:
            yield from self.source

    def _rows(self, index: Tensor) -> Batch:
        return select_rows(self.whole, index)

    def check_scale(self, program: Program) -> None:
        """Check that a program, built on the first batch, scales its log likelihood by N/B.

        :raises ValueError: if the program does not know N, or a wrong N.
        :raises UnsupportedProgramError: if there is a latent for each datum, if a discrete site
            stands outside of the data's plate.
        """
        with torch.no_grad():
            run = program.run(program.initial)
        sites = run.observed
        rows, known = counted(sites)
        if self.is_whole:
            if known != rows:
                raise ValueError(
                    f"the program states {known} data, but uses {rows} of one batch of "
                    f"{self.size}: pass all of them, (x, y) with batch_size= or an iterable of "
                    "batches, to a program without subsample_size"
                )
            return
        bias = run.bias_of_minibatches()
        if bias is not None:
            raise UnsupportedProgramError(bias)
        parts = {plate for plate, (size, present) in program.plates.items() if present < size}
        parts |= {plate for plate, _ in plates_of_rows(sites, program.args).values()}
        why = "which minibatches cannot move"
        refuse_local_latents(program.latents, parts, why, "pass all data at once")
        total = self.source.num_data if self.num_rows is None else self.num_rows
        stated = stated_data(sites, self.size, total, exact=self.num_rows is not None)
        said = total not in (None, stated)  # by a warning
        self.stated = stated if rows == self.size and not said else None

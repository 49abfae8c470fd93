"""Gradient steps over minibatches: the loop that trainings share, and their record."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_bdl.errors import ArgumentError
from pyro_bdl.program.batches import device_of_rows, leading_size, taken
from pyro_bdl.program.check import TENSORS_NEEDED, by_entry, kind_of
from pyro_bdl.training.checkpoint import Losses
from pyro_bdl.training.minibatches import Minibatches
from pyro_bdl.utils.progress import hidden
from pyro_bdl.utils.validation import whole_number

BATCH = 256
_MOST_FULL_BATCH = 1024
_SHOWN_EVERY = 50
_REFRESH = 0.5  # seconds


@dataclass(frozen=True, repr=False)
class Training:
    """The record of a training run.

    :param losses: ``(steps,)``, the negative ELBO of each step taken, in nats.
    :param batch_size: rows in each step.
    :param interrupted: whether Ctrl-C ended it early.
    :param held_out: the mean log likelihood of the rows held back, in nats, (checks, members); one
        member of a guide that is no ensemble. None without ``held_out``.
    :param best_steps: the step whose parameters each member has now, (members,).
    :param learning_rate: the one that ``collect_swag`` found or was given.
    :param skipped: the numbers of the steps whose loss or gradient was not finite, from 0.
    """

    losses: Tensor
    batch_size: int
    interrupted: bool
    held_out: Tensor | None = None
    best_steps: Tensor | None = None
    learning_rate: float | None = None
    skipped: tuple[int, ...] = ()

    def __repr__(self) -> str:
        """The run in a line: its steps, the first and the last loss, and how it ended."""
        said = [f"{len(self.losses)} steps of {self.batch_size} rows"]
        if len(self.losses):
            said.append(f"loss {self.losses[0]:.5g} to {self.losses[-1]:.5g}")
        if self.best_steps is not None:
            steps = ", ".join(map(str, self.best_steps.tolist()))
            said.append(f"parameters of step {steps}")
        if self.skipped:
            said.append(f"{len(self.skipped)} skipped")
        if self.interrupted:
            said.append("interrupted")
        return f"Training({', '.join(said)})"


class Descent:
    """Gradient steps over minibatches.

    :param step: ``step(x, y, rows=rows)`` takes a step with these rows and returns its loss, or
        None if there is none to keep.
    :param size: rows in each step.
    :param after: called with the number of steps after each step.
    """

    def __init__(
        self,
        step: Callable[..., Tensor | None],
        x: Any,
        y: Any,
        size: int,
        *,
        after: Callable[[int], None],
    ) -> None:
        self.step, self.after = step, after
        self.x, self.y = x, y
        self.batches = Minibatches(leading_size(x), size, device=device_of_rows(x))
        self.losses = Losses()

    def run(self, numbers: Iterable[int], steps: int, progress: str | None) -> tuple[Tensor, bool]:
        """Take the steps of these numbers, with a progress bar of ``steps`` steps.

        :returns: the losses (steps taken,), and whether Ctrl-C ended the steps.
        """
        bar = tqdm(
            total=steps,
            desc=progress,
            disable=progress is None or hidden(None),
            leave=False,
            mininterval=_REFRESH,
            delay=1,
        )
        losses = self.losses.values
        with bar:
            try:
                for number in numbers:
                    bar.update(number - bar.n)
                    rows = self.batches.next()
                    x, y = self.x, self.y
                    batch = (x, y) if rows is None else (taken(x, rows), taken(y, rows))
                    loss = self.step(*batch, rows=rows)
                    if loss is not None:
                        losses.append(loss)
                    self.after(number + 1)
                    if losses and len(losses) % _SHOWN_EVERY == 0:
                        recent = torch.stack(losses[-_SHOWN_EVERY:]).mean().item()
                        bar.set_postfix_str(f"loss {recent:.4g}", refresh=False)
            except KeyboardInterrupt:
                return self.losses.stacked(), True
        return self.losses.stacked(), False


def num_rows(**arguments: Any) -> int:
    """The number of rows of tensors, or of dicts of tensors.

    :raises ArgumentError: for an argument of another kind.
    """
    entries = by_entry(arguments)
    for name, value in entries.items():
        if not isinstance(value, Tensor):
            raise ArgumentError(f"{name} is a {kind_of(value)}: {TENSORS_NEEDED}")
    return leading_size(entries)


def rows_per_step(model: Callable, rows: int, asked: int | None, total: int | None = None) -> int:
    """The rows of each step, see ``batch_size`` of ``train``.

    :param rows: the number of rows to train on.
    :param asked: the number that was asked for; None for the default.
    :param total: the number of all data, with those held back; by default ``rows``.
    :raises ValueError: for fewer rows than all, if the program's ``num_data`` is not their number.
    """
    total = rows if total is None else total
    knows_all = getattr(model, "num_data", None) == total
    if asked is None:
        return BATCH if rows > _MOST_FULL_BATCH and knows_all else rows
    asked = whole_number(asked, "batch_size")
    if asked < rows and not knows_all:
        raise ValueError(
            f"batch_size={asked} of {rows} rows needs a program that knows of all of them: make "
            f"it with num_data={total}"
        )
    return min(asked, rows)

"""Gradient steps over minibatches: the loop that all trainings share, and its record."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_bdl.elbo.checks import check_data, unchecked
from pyro_bdl.errors import ArgumentError, FailedStepError, warn
from pyro_bdl.program.batch_norm import keeps_statistics
from pyro_bdl.program.batches import device_of_rows, leading_size, taken
from pyro_bdl.program.check import TENSORS_NEEDED, kind_of, named_arguments
from pyro_bdl.utils.module_state import Modules
from pyro_bdl.utils.progress import hidden
from pyro_bdl.utils.validation import listed, whole_number

BATCH = 256
_MOST_FULL_BATCH = 1024
_MOST_SKIPPED = 10  # in a row
_SHOWN_EVERY = 50


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
        words = [f"{len(self.losses)} steps of {self.batch_size} rows"]
        if len(self.losses):
            words.append(f"loss {self.losses[0]:.5g} to {self.losses[-1]:.5g}")
        if self.best_steps is not None:
            steps = ", ".join(map(str, self.best_steps.tolist()))
            words.append(f"parameters of step {steps}")
        if self.skipped:
            words.append(f"{len(self.skipped)} skipped")
        if self.interrupted:
            words.append("interrupted")
        return f"Training({', '.join(words)})"


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

    def next(self) -> Tensor | None:
        """The indices of the next batch; None for all rows."""
        if self.size >= self.rows:
            return None
        if self._order is None or self._position + self.size > self.rows:
            self._order, self._position = torch.randperm(self.rows, device=self.device), 0
        start = self._position
        self._position += self.size
        return self._order[start : self._position]

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


class Descent:
    """Gradient steps over minibatches, taken where the loss and its gradient are finite.

    Both are read before the optimizer steps, so that there is nothing to undo. Batches, losses and
    skipped steps are a part of a ``Checkpoint``.

    :param objective: a bound at a program and its guide, ``elbo(model, guide)``.
    :param args: the program's arguments with all rows.
    :param size: rows in each step.
    :param scale: a factor of the bound in the loss.
    :param on_nonfinite: "raise" an error, or "skip" the optimizer's step with a warning.
    :raises ValueError: for another policy.
    """

    def __init__(
        self,
        objective: Any,
        optimizer: torch.optim.Optimizer,
        args: tuple,
        size: int,
        *,
        scale: float = 1.0,
        on_nonfinite: str = "raise",
    ) -> None:
        if on_nonfinite not in ("raise", "skip"):
            raise ValueError(f"on_nonfinite must be 'raise' or 'skip', got {on_nonfinite!r}")
        self.objective, self.optimizer, self.scale = objective, optimizer, scale
        self.args, self.policy = args, on_nonfinite
        self.batches = Minibatches(leading_size(args), size, device=device_of_rows(args))
        self.losses: list[Tensor] = []
        self.skipped: list[int] = []

    def run(
        self, numbers: Iterable[int], steps: int, progress: str | None, after: Callable[[int], None]
    ) -> bool:
        """Take the steps of these numbers; return whether Ctrl-C ended them, with a warning.

        :param steps: the number of all steps, for the progress bar.
        :param progress: description of the bar; None for no bar.
        :param after: called with the number of steps after each step.
        """
        hide = progress is None or hidden(None)
        with tqdm(total=steps, desc=progress, disable=hide, leave=False, delay=1) as bar:
            try:
                for number in numbers:
                    bar.update(number - bar.n)
                    self.step(number)
                    after(number + 1)
                    if not hide and self.losses and number % _SHOWN_EVERY == 0:
                        recent = torch.stack(self.losses[-_SHOWN_EVERY:]).mean().item()
                        bar.set_postfix_str(f"loss {recent:.4g}", refresh=False)
            except KeyboardInterrupt:
                warn(
                    f"interrupted after {len(self.losses)} of {steps} steps: what was reached is "
                    "kept",
                    "interrupted",
                    stacklevel=3,
                )
                return True
        return False

    def step(self, number: int) -> None:
        """Take a step with the next rows, or skip it.

        :raises FailedStepError: for a loss or gradient that is not finite, if the policy is
            "raise", at the tenth such step in a row, or if running statistics are not finite.
        """
        rows = self.batches.next()
        args = self.args if rows is None else tuple(taken(value, rows) for value in self.args)
        with unchecked(self.objective.elbo):
            loss = self.objective(*args) * self.scale
        self.optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if bool(loss.isfinite() & self._largest_gradient(loss).isfinite()):
            self.optimizer.step()
            self.losses.append(loss)
            return
        self.optimizer.zero_grad()
        words = "" if rows is None else f", rows {listed(rows.tolist())}"
        self._skip(number, f"step {number}{words}: {self._reason(loss, args)}")

    def _largest_gradient(self, loss: Tensor) -> Tensor:
        gradients = [
            p.grad.coalesce().values() if p.grad.is_sparse else p.grad
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        return torch.nn.utils.get_total_norm(gradients, norm_type=torch.inf).to(loss)

    def _reason(self, loss: Tensor, args: tuple) -> str:
        if loss.isfinite():
            return "the gradient is not finite (torch.autograd.set_detect_anomaly finds where)"
        try:
            check_data(self.objective.model, self.objective.guide, args, {})
        except ValueError as error:
            return f"the loss is {loss.item()}, since {error}"
        return f"the loss is {loss.item()}"

    def _skip(self, number: int, reason: str) -> None:
        self.skipped.append(number)
        modules = Modules(self.objective.model, self.objective.guide)
        layers: list[Any] = [m for m in modules if keeps_statistics(m)]
        if self.policy == "raise":
            action = "the parameters are those before it"
        elif self.skipped[-_MOST_SKIPPED:] == [*range(number - _MOST_SKIPPED + 1, number + 1)]:
            action = f"the last of {_MOST_SKIPPED} in a row"
        elif not all(layer.running_var.isfinite().all() for layer in layers):
            action = "it left running statistics that are not finite"
        else:
            warn(f"{reason}: the step is left out", "failed-steps", stacklevel=5)
            return
        raise FailedStepError(f"{reason}: {action}", step=number)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, the losses and the skipped steps."""
        state = {"losses": self.stacked_losses(), "skipped": self.skipped}
        return {**self.batches.state_dict(), **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken."""
        self.batches.load_state_dict(state)
        self.losses, self.skipped = list(state["losses"]), list(state["skipped"])

    def stacked_losses(self) -> Tensor:
        """(steps,), on the device of the losses."""
        return torch.stack(self.losses) if self.losses else torch.empty(0, device="cpu")


def num_rows(model: Callable, args: tuple) -> int:
    """The number of rows of a program's arguments: tensors, or dicts of tensors.

    :raises ArgumentError: for an argument of another kind.
    """
    for name, value in named_arguments(model, args, {}).items():
        if not isinstance(value, Tensor):
            raise ArgumentError(f"{name} is a {kind_of(value)}: {TENSORS_NEEDED}")
    return leading_size(args)


def rows_per_step(model: Callable, rows: int, size: int | None, total: int) -> int:
    """The rows of each step, see ``batch_size`` of ``train``.

    :param rows: the number of rows to train on.
    :param size: the number that the user wants; None for the default.
    :param total: the number of all data, with those held back.
    :raises ValueError: for fewer rows than all, if the program's ``num_data`` is not their number.
    """
    knows_all = getattr(model, "num_data", None) == total
    if size is None:
        return BATCH if rows > _MOST_FULL_BATCH and knows_all else rows
    size = whole_number(size, "batch_size")
    if size < rows and not knows_all:
        raise ValueError(
            f"batch_size={size} of {rows} rows needs a program that knows of all of them: make "
            f"it with num_data={total}"
        )
    return min(size, rows)

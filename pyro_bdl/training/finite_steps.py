"""Gradient steps that only a finite loss with a finite gradient takes."""

import warnings
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.elbo.finite_loss import left_to_caller
from pyro_bdl.elbo.tempered import check_data
from pyro_bdl.errors import BdlWarning, FailedStepError
from pyro_bdl.program.batch_norm import keeps_statistics
from pyro_bdl.utils.module_state import modules_of
from pyro_bdl.utils.validation import listed

POLICIES = ("raise", "skip")
_MOST = 10  # skipped steps in a row


class FiniteSteps:
    """Steps of an optimizer of torch down a loss.

    Loss and gradient are read before the optimizer steps, so that there is nothing to undo.

    :param objective: a bound at a program and a guide, ``elbo(model, guide)``.
    :param on_nonfinite: "raise" an error, or "skip" the optimizer's step with a warning.
    :raises ValueError: for another policy.
    """

    def __init__(
        self, objective: Any, optimizer: torch.optim.Optimizer, on_nonfinite: str = "raise"
    ) -> None:
        if on_nonfinite not in POLICIES:
            raise ValueError(f"on_nonfinite must be 'raise' or 'skip', got {on_nonfinite!r}")
        self.objective, self.optimizer, self.policy = objective, optimizer, on_nonfinite
        self.number, self.in_a_row = 0, 0
        self.skipped: list[int] = []

    def step(self, *args: Any, rows: Tensor | None = None) -> Tensor | None:
        """Take a step, and return its loss; None if it was skipped.

        :param args: the program's arguments.
        :param rows: the numbers of their rows, for errors.
        :raises FailedStepError: for a loss or gradient that is not finite, if the policy is
            "raise", at the tenth such step in a row, or if running statistics are not finite.
        """
        with left_to_caller():
            loss = self.objective(*args)
        self.optimizer.zero_grad()
        loss.backward()
        loss, number = loss.detach(), self.number
        self.number += 1
        if bool(loss.isfinite() & self._largest_gradient(loss).isfinite()):
            self.optimizer.step()
            self.in_a_row = 0
            return loss
        self.optimizer.zero_grad()
        self._leave_out(number, f"step {number}{_words(rows)}: {self._reason(loss, args)}")
        return None

    def _largest_gradient(self, loss: Tensor) -> Tensor:
        gradients = [
            p.grad.coalesce().values() if p.grad.is_sparse else p.grad
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        largest = torch.nn.utils.get_total_norm(gradients, norm_type=torch.inf)
        return largest.to(loss)

    def _reason(self, loss: Tensor, args: tuple) -> str:
        if loss.isfinite():
            return "the gradient is not finite (torch.autograd.set_detect_anomaly finds where)"
        try:
            check_data(self.objective.model, self.objective.guide, args, {})
        except ValueError as error:
            return f"the loss is {loss.item()}, since {error}"
        return f"the loss is {loss.item()}"

    def _leave_out(self, number: int, reason: str) -> None:
        self.skipped.append(number)
        self.in_a_row += 1
        if self.policy == "raise":
            action = "the parameters are those before it"
        elif self.in_a_row == _MOST:
            action = f"the last of {_MOST} in a row"
        elif not self._has_finite_statistics():
            action = "it left running statistics that are not finite"
        else:
            warnings.warn(f"{reason}: the step is left out", BdlWarning, stacklevel=5)
            return
        raise FailedStepError(f"{reason}: {action}", step=number)

    def _has_finite_statistics(self) -> bool:
        layers: list[Any] = [m for m in modules_of(self.objective) if keeps_statistics(m)]
        return all(bool(layer.running_var.isfinite().all()) for layer in layers)


def _words(rows: Tensor | None) -> str:
    return "" if rows is None else f", rows {listed(rows.tolist())}"

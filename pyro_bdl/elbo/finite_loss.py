"""Checks of training losses before their gradients reach an optimizer."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from pyro.util import warn_if_nan
from torch import Tensor
from torch.autograd import Variable


class OnHost:
    """A tensor's values on the CPU, copied from an accelerator without waiting for it."""

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._value = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._value.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._value = tensor

    def value(self) -> Tensor:
        """Return the values; wait until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._value


def require_gradients() -> None:
    """Check that gradients can be taken.

    :raises RuntimeError: in inference mode, which has no gradients.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "torch.inference_mode() turns off the gradients that a training step needs: train "
            "outside of it"
        )


class CheckedLoss:
    """The part of an ELBO that checks its loss before an optimizer can step.

    A subclass defines ``unchecked_loss``, the loss to differentiate.
    """

    checks_loss = True  # see ``unchecked``
    retain_graph: bool | None

    def unchecked_loss(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Tensor:
        """Take a step; return its loss, which may be not finite."""
        raise NotImplementedError

    def check_data(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> None:
        """Raise an error if the data cause a loss that is not finite."""
        raise NotImplementedError

    def differentiable_loss(
        self, model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return -L(eta) as a tensor to differentiate; counts as a step of the schedule."""
        loss = self.unchecked_loss(model, guide, args, kwargs)
        check = partial(self.check_data, model, guide, args, kwargs)
        return guarded(loss, check) if self.checks_loss else loss

    def loss_and_grads(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Return -L(eta) in nats and add its gradients to the parameters' gradients."""
        require_gradients()
        loss = self.unchecked_loss(model, guide, args, kwargs)
        value = check_value(loss.item(), partial(self.check_data, model, guide, args, kwargs))
        if loss.requires_grad:
            loss.backward(retain_graph=self.retain_graph)
        return value


@contextmanager
def unchecked(elbo: Any) -> Iterator[None]:
    """Let an ELBO's ``differentiable_loss`` return any loss, for a caller that checks it."""
    before = getattr(elbo, "checks_loss", None)
    if before is None:  # it is not one of this package
        yield
        return
    elbo.checks_loss = False
    try:
        yield
    finally:
        elbo.checks_loss = before


def guarded(loss: Tensor, check_data: Callable[[], None]) -> Tensor:
    """Return the loss, and check before an optimizer can step that it is finite.

    On the CPU the loss is checked at once. On an accelerator it is checked at the end of
    ``backward``, when the gradients' kernels are queued, so that no step waits for the device. See
    ``check_value`` for the check.

    :param loss: a scalar.
    :param check_data: a function that raises an error if the data cause the problem.
    """
    if _has_no_number(loss):
        return loss
    if loss.device.type == "cpu":
        check_value(loss.item(), check_data)
    elif loss.requires_grad:
        number = OnHost(loss)

        def check() -> None:
            check_value(number.value().item(), check_data)

        at_end_of_backward(loss, check)
    return loss


def at_end_of_backward(loss: Tensor, function: Callable[[], None]) -> None:
    """Call a function when a ``backward`` through ``loss`` has finished all gradients.

    ``backward`` raises the function's errors.
    """
    loss.register_hook(lambda _: Variable._execution_engine.queue_callback(function))


def check_value(loss: float, check_data: Callable[[], None]) -> float:
    """Return the loss; if it is not finite, call ``check_data``, and warn if that raises nothing.

    :raises ValueError: from ``check_data``.
    """
    if not math.isfinite(loss):
        check_data()
        warn_if_nan(torch.tensor(loss, device="cpu"), "loss")
    return loss


def _has_no_number(loss: Tensor) -> bool:
    """Return whether a loss has no readable value: in vmap, a trace, or the capture of a CUDA
    graph."""
    return (
        (loss.is_cuda and torch.cuda.is_current_stream_capturing())
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.compiler.is_compiling()
    )

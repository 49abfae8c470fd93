"""Training steps that go wrong: stop, leave out the batch, or go back to the last good state."""

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.util import zero_grads
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pyro_bdl.elbo.finite_loss import OnHost, left_to_caller
from pyro_bdl.elbo.tempered import check_data
from pyro_bdl.errors import BdlWarning, FailedStepError
from pyro_bdl.training.checkpoint import adapter
from pyro_bdl.utils.module_state import modules_of
from pyro_bdl.utils.tables import listed
from pyro_bdl.utils.validation import whole_number

POLICIES = ("stop", "skip", "restore")
_WINDOW = 20  # losses whose median says where the training is
_ROWS_SHOWN = 8


@dataclass(frozen=True)
class Failure:
    """A training step that went wrong.

    :param step: its number, from 0.
    :param batch: the batch in words; empty if the step was not told it.
    :param reason: what went wrong.
    :param action: what was done.
    """

    step: int
    batch: str
    reason: str
    action: str

    def __str__(self) -> str:
        where = f"step {self.step}" + (f", {self.batch}" if self.batch else "")
        return f"{where}: {self.reason}: {self.action}"


class Safeguard:
    """Training steps after which parameters, optimizer and buffers are never NaN or infinite.

    ::

        safeguard = bdl.training.Safeguard(svi, on_failure="skip")
        for x, y in batches:
            loss = safeguard.step(x, y)  # in place of svi.step(x, y)

    A step goes wrong if

    - its loss or its gradient is not finite, or the batch is not,
    - it runs out of memory,
    - the optimizer's new parameters are not finite,
    - or the loss diverges: the median of the last 20 losses lies more than ``divergence`` times
      the first median (or the range of its losses, if that is larger) above the lowest median so
      far. Losses of different temperatures are not compared.

    Nothing of a step that went wrong remains: parameters, the optimizer's state and buffers such as
    the statistics of BatchNorm layers are those before it. What follows is the policy:

    - "stop": ``FailedStepError`` names the step, the batch and the reason.
    - "skip": a warning, and the training goes on with the next batch as if there had been no such
      batch: random numbers and the temperature's schedule go on from before it.
    - "restore": a warning, and the last good state (parameters, optimizer, buffers) is put back
      with ``factor`` times the learning rate. It was stored at most ``every`` good steps before;
      its loss and gradient were finite, and its loss had not risen. Out of memory, the batch is
      left out instead.

    A divergence has no batch of its own and stops "skip" too. The gradient's norm and the loss are
    read from the device once in each step. Memory for one more copy of the parameters is needed
    while the optimizer steps, and with "restore" for one of the parameters, the optimizer's state
    and the buffers throughout.

    :param steps: a ``pyro.infer.SVI``; or a function from a batch to the loss, such as
        ``elbo(model, guide)``, with ``optimizer``.
    :param optimizer: of torch, for such a function.
    :param schedule: a learning-rate schedule of torch, whose base rates fall with the rate.
    :param on_failure: one of ``POLICIES``.
    :param every: steps between stored states.
    :param factor: of the learning rate, in (0, 1).
    :param divergence: see above; None for no check.
    :param most: the number of failures in a row at which the training stops under any policy.
    :raises ValueError: for another policy, or numbers out of range.
    :raises TypeError: for a function without an optimizer.
    """

    def __init__(
        self,
        steps: SVI | Callable[..., Tensor],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        on_failure: str = "stop",
        schedule: Any = None,
        every: int = 100,
        factor: float = 0.5,
        divergence: float | None = 10.0,
        most: int = 10,
    ) -> None:
        if on_failure not in POLICIES:
            raise ValueError(f"on_failure must be one of {', '.join(POLICIES)}, got {on_failure!r}")
        if not 0 < factor < 1:
            raise ValueError(f"factor must lie between 0 and 1, got {factor}")
        if divergence is not None and not divergence > 0:
            raise ValueError(f"divergence must be positive or None, got {divergence}")
        self.on_failure, self.factor, self.schedule = on_failure, factor, schedule
        self.every, self.most = whole_number(every, "every"), whole_number(most, "most")
        self.failures: list[Failure] = []
        self.number = 0
        if isinstance(steps, SVI):
            self._kind: _OfSVI | _OfTorch = _OfSVI(steps)
        elif optimizer is None:
            raise TypeError("give the optimizer too, or a pyro.infer.SVI, which has one")
        else:
            self._kind = _OfTorch(steps, optimizer)
        self._modules: list[nn.Module] | None = None
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}  # by id: the buffer and its copy
        self._course = None if divergence is None else _Course(divergence)
        self._good: _State | None = None
        self._is_finite: Tensor | None = None  # the last new parameters, on an accelerator
        self._in_a_row = 0
        self._since_good = 0

    def step(self, *args: Any, batch: Any = None, **kwargs: Any) -> Any:
        """Take a step with the arguments of ``svi.step`` or of the function.

        :param batch: names the batch in messages: the numbers of its rows as a tensor, or words.
        :returns: the loss, as ``svi.step`` or the function return it, detached; None if the step
            went wrong.
        :raises FailedStepError: if the policy, or the number of failures in a row, says stop.
        """
        kind, number = self._kind, self.number
        self.number += 1
        self._keep_buffers()
        before = _Before(kind.elbo, kind.parameters(), with_random=self.on_failure == "skip")
        loss, reason, cause = self._gradients(args, kwargs)
        if reason is None and self._course is not None:
            reason = self._course.add(kind.number, getattr(kind.elbo, "temperature", None))
            cause = _DIVERGED if reason is not None else None
        if reason is None:
            self._store_good_state()
            reason, cause = self._apply()
        if reason is None:
            kind.clear()
            self._in_a_row = 0
            return loss
        kind.clear()
        self._put_back_buffers()
        before.put_back()
        self._fail(number, _words(batch), reason, cause)
        return None

    # One step

    def _gradients(self, args: tuple, kwargs: dict) -> tuple[Any, str | None, Any]:
        """The loss, what is wrong with it, and the error behind that."""
        kind = self._kind
        try:
            with left_to_caller():
                loss = kind.gradients(args, kwargs)
        except Exception as error:  # most are raised again
            reason = _reason(error, args, kwargs)
            if reason is None:
                raise
            return None, reason, _OUT_OF_MEMORY if _is_out_of_memory(error) else error
        gradients = [p.grad for p in kind.parameters() if p.grad is not None]
        norms, last = _norms(gradients), self._is_finite
        if isinstance(loss, Tensor):
            norms, loss = [loss.detach(), *norms], loss.detach()
        numbers = _read(norms if last is None else [*norms, last])
        if isinstance(loss, Tensor):
            kind.number = numbers[0]
        if not math.isfinite(kind.number):
            return loss, self._explained(f"the loss is {kind.number}", args, kwargs), None
        if not all(map(math.isfinite, numbers)):
            return loss, "the gradient is not finite", None
        if last is not None and not numbers[-1]:
            self._is_finite = None
            return loss, f"{_NEW_PARAMETERS}, in the step before", None
        return loss, None, None

    @torch.no_grad()
    def _apply(self) -> tuple[str | None, Any]:
        """Step the optimizer; if that goes wrong, put the old parameters back and say why."""
        parameters = self._kind.parameters()
        old = [parameter.detach().clone() for parameter in parameters]

        def put_back() -> None:
            for parameter, value in zip(parameters, old, strict=True):
                parameter.copy_(value)

        try:
            self._kind.apply()
        except Exception as error:
            put_back()
            if _is_out_of_memory(error):
                return _first_line(error), _OUT_OF_MEMORY
            raise
        norms = _norms(parameters)
        if all(norm.device.type == "cpu" for norm in norms):
            if all(map(math.isfinite, _read(norms))):
                return None, None
            put_back()
            return _NEW_PARAMETERS, None
        finite = torch.stack([norm.to(norms[0]) for norm in norms]).sum().isfinite()
        for parameter, value in zip(parameters, old, strict=True):
            parameter.copy_(torch.where(finite.to(parameter.device), parameter, value))
        self._is_finite = finite  # read in the next step, so that none waits for it
        return None, None

    def _explained(self, reason: str, args: tuple, kwargs: dict) -> str:
        kind = self._kind
        if kind.model is None or kind.guide is None:
            return reason
        try:
            check_data(kind.model, kind.guide, args, kwargs)
        except Exception as error:  # any error says more than the loss does
            return f"{reason}, since {error}"
        return reason

    # Failures

    def _fail(self, step: int, batch: str, reason: str, cause: Any) -> None:
        self._in_a_row += 1
        can_restore = self.on_failure == "restore" and cause is not _OUT_OF_MEMORY
        error = cause if isinstance(cause, Exception) else None
        stop = self.on_failure == "stop" or (self.on_failure == "skip" and cause is _DIVERGED)
        if self._in_a_row >= self.most and not stop:
            stop, reason = True, f"{reason}, after {self.most} failures in a row"
        if stop:
            if self._good is not None:
                self._good.put_back()
            action = "stopped, with the state before this step"
            if self._good is not None:
                action = f"stopped, with the state of step {self._good.step}"
            failure = Failure(step, batch, reason, action)
            self.failures.append(failure)
            raise FailedStepError(f"{failure}", step=step) from error
        action = "the batch is left out"
        if can_restore and self._good is not None:
            rates = self._kind.rates()
            self._good.put_back()
            self._kind.set_rates([rate * self.factor for rate in rates])
            if self.schedule is not None:
                self.schedule.base_lrs = [r * self.factor for r in self.schedule.base_lrs]
            if self._course is not None:
                self._course.forget()
            action = (
                f"back to the state of step {self._good.step}, with {self.factor:g} times the "
                "learning rate"
            )
        failure = Failure(step, batch, reason, action)
        self.failures.append(failure)
        warnings.warn(str(failure), BdlWarning, stacklevel=4)
        if torch.cuda.is_initialized() and cause is _OUT_OF_MEMORY:
            torch.cuda.empty_cache()

    def _store_good_state(self) -> None:
        if self.on_failure != "restore":
            return
        due = self._good is None or self._since_good >= self.every
        self._since_good += 1
        if due and (self._course is None or self._course.is_low()):
            parameters = self._kind.parameters()
            buffers = [(buffer, value.clone()) for buffer, value in self._buffers.values()]
            self._good = _State(self.number - 1, parameters, self._kind.optimizer, buffers)
            self._since_good = 1

    @torch.no_grad()
    def _keep_buffers(self) -> None:
        """Keep copies of the buffers, in the memory of the copies before."""
        if self._modules is None:
            self._modules = modules_of(*self._kind.programs())
        kept = {}
        for module in self._modules:
            for buffer in module._buffers.values():
                if buffer is not None and id(buffer) not in kept:
                    value = self._buffers.get(id(buffer), (None, None))[1]
                    if value is None or value.shape != buffer.shape:
                        value = torch.empty_like(buffer)
                    kept[id(buffer)] = buffer, value.copy_(buffer)
        self._buffers = kept

    @torch.no_grad()
    def _put_back_buffers(self) -> None:
        for buffer, value in self._buffers.values():
            buffer.copy_(value)


_DIVERGED, _OUT_OF_MEMORY = "diverged", "out of memory"
_NEW_PARAMETERS = "the optimizer's new parameters are not finite"


class _OfSVI:
    """The parts of a step of ``pyro.infer.SVI``."""

    def __init__(self, svi: SVI) -> None:
        self.svi, self.model, self.guide = svi, svi.model, svi.guide
        self.optimizer: Any = svi.optim
        self.elbo = getattr(svi.loss_and_grads, "__self__", None)
        self.number = math.nan
        self._seen: list[Tensor] = []

    def programs(self) -> tuple[Any, ...]:
        return self.model, self.guide

    def parameters(self) -> list[Tensor]:
        """The parameters of the last step."""
        return self._seen

    def gradients(self, args: tuple, kwargs: dict) -> Any:
        svi: Any = self.svi
        capture: Any = poutine.trace(param_only=True)
        with capture:
            try:
                loss = svi.loss_and_grads(self.model, self.guide, *args, **kwargs)
            finally:
                sites = capture.trace.nodes.values()
                seen = {site["value"].unconstrained(): None for site in sites}
                self._seen = list(seen)
        parts = loss if isinstance(loss, tuple) else (loss,)
        parts = tuple(p.item() if isinstance(p, Tensor) else p for p in parts)
        self.number = sum(parts)
        return parts if isinstance(loss, tuple) else parts[0]

    def apply(self) -> None:
        with torch.enable_grad():
            self.svi.optim(set(self._seen))

    def clear(self) -> None:
        zero_grads(self._seen)

    def rates(self) -> list[float]:
        return [group["lr"] for group in _groups(self.optimizer)]

    def set_rates(self, rates: list[float]) -> None:
        before = self.rates()
        for group, rate in zip(_groups(self.optimizer), rates, strict=True):
            group["lr"] = rate
        arguments = getattr(self.optimizer, "pt_optim_args", None)
        if isinstance(arguments, dict) and "lr" in arguments and before and before[0] > 0:
            arguments["lr"] *= rates[0] / before[0]  # of parameters that are seen later


class _OfTorch:
    """The parts of a step of a torch optimizer."""

    def __init__(self, objective: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> None:
        self.objective, self.optimizer = objective, optimizer
        self.model = getattr(objective, "model", None)
        self.guide = getattr(objective, "guide", None)
        self.elbo = getattr(objective, "elbo", None)
        self.number = math.nan

    def programs(self) -> tuple[Any, ...]:
        return (self.objective,)

    def parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def gradients(self, args: tuple, kwargs: dict) -> Tensor:
        loss = self.objective(*args, **kwargs)
        self.optimizer.zero_grad()
        loss.backward()
        return loss

    def apply(self) -> None:
        with torch.enable_grad():
            self.optimizer.step()

    def clear(self) -> None:
        """The gradients of a step are removed before the next ``backward``."""

    def rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def set_rates(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _groups(optimizer: Any) -> Iterator[dict[str, Any]]:
    """The parameter groups of an optimizer of Pyro, which may hold others or schedules."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        yield from inner.param_groups
        if getattr(optimizer, "others", None) is not None:
            yield from _groups(optimizer.others)
        return
    for each in getattr(optimizer, "optim_objs", {}).values():
        yield from getattr(each, "optimizer", each).param_groups


class _Before:
    """Random states and the temperature's step before a training step."""

    def __init__(self, elbo: Any, parameters: list[Tensor], *, with_random: bool) -> None:
        self.elbo = elbo if isinstance(getattr(elbo, "step", None), int) else None
        self.step = None if self.elbo is None else self.elbo.step
        self.random = torch.get_rng_state() if with_random else None
        self.device, self.on_device = None, None
        if with_random and parameters and parameters[0].is_cuda:
            self.device = parameters[0].device
            self.on_device = torch.cuda.get_rng_state(self.device)

    def put_back(self) -> None:
        if self.elbo is not None:
            self.elbo.step = self.step
        if self.random is not None:
            torch.set_rng_state(self.random)
        if self.on_device is not None and self.device is not None:
            torch.cuda.set_rng_state(self.on_device, self.device)


class _State:
    """Parameters, the optimizer's state and buffers at one step."""

    def __init__(
        self,
        step: int,
        parameters: list[Tensor],
        optimizer: Any,
        buffers: list[tuple[Tensor, Tensor]],
    ) -> None:
        self.step = step
        self.parameters = [(parameter, parameter.detach().clone()) for parameter in parameters]
        self.optimizer = adapter("optimizer", optimizer)
        self.state = tree_map_only(Tensor, torch.clone, self.optimizer.state())
        self.buffers = buffers

    @torch.no_grad()
    def put_back(self) -> None:
        for tensor, value in (*self.parameters, *self.buffers):
            tensor.copy_(value)
        self.optimizer.load(tree_map_only(Tensor, torch.clone, self.state))


class _Course:
    """The course of the losses, as medians of the last few."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.recent: deque[float] = deque(maxlen=_WINDOW)
        self.temperature: Any = None
        self.lowest = self.scale = self.median = math.nan

    def add(self, loss: float, temperature: Any) -> str | None:
        """Add a loss; if the losses diverge, say so."""
        if temperature != self.temperature:
            self.recent.clear()
            self.temperature, self.lowest = temperature, math.nan
        self.recent.append(loss)
        if len(self.recent) < _WINDOW:
            return None
        ordered = sorted(self.recent)
        self.median = ordered[_WINDOW // 2]
        if math.isnan(self.lowest):
            self.lowest = self.median
            self.scale = max(abs(self.median), ordered[-1] - ordered[0])
        self.lowest = min(self.lowest, self.median)
        if self.median - self.lowest <= self.ratio * self.scale:
            return None
        return (
            f"the loss diverges: the median of the last {_WINDOW} is {self.median:.4g}, and the "
            f"lowest was {self.lowest:.4g}"
        )

    def is_low(self) -> bool:
        """Return whether the losses are near their lowest median."""
        return len(self.recent) < _WINDOW or self.median - self.lowest <= self.scale

    def forget(self) -> None:
        """Forget the last losses, but not the lowest median."""
        self.recent.clear()


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Norms, one or more for all tensors; finite if the numbers and their squares are."""
    plain = [tensor.detach() for tensor in tensors if not tensor.is_sparse]
    sparse = [tensor.detach().coalesce().values() for tensor in tensors if tensor.is_sparse]
    return list(torch._foreach_norm([*plain, *sparse])) if tensors else []


def _read(scalars: list[Tensor]) -> list[float]:
    """The values of scalars, read from an accelerator at once."""
    if all(scalar.device.type == "cpu" for scalar in scalars):
        return [scalar.item() for scalar in scalars]
    home = next(scalar for scalar in scalars if scalar.device.type != "cpu")
    together = torch.stack([s.to(home.device, torch.promote_types(s.dtype, torch.float32))
        for s in scalars])  # fmt: skip
    return OnHost(together).value().tolist()


def _reason(error: Exception, args: tuple, kwargs: dict) -> str | None:
    """The reason of a failure; None for an error of another kind, such as one of the program."""
    text = _first_line(error)
    if _is_out_of_memory(error):
        return f"out of memory ({text})"
    if isinstance(error, torch.linalg.LinAlgError | FloatingPointError):
        return text
    if isinstance(error, ValueError):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point()):
            return f"the batch is not finite ({text})"
        if _INVALID in str(error):  # of torch's validation of distributions
            return text
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_INVALID = "found invalid values"


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _words(batch: Any) -> str:
    """A batch in words."""
    if batch is None:
        return ""
    if isinstance(batch, Tensor):
        numbers = batch.reshape(-1).tolist()
        return f"rows {listed(map(str, numbers), _ROWS_SHOWN)}"
    return str(batch)

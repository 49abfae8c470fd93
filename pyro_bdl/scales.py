"""Scales of priors and of noise, as numbers, parameters or latents, and the scope that holds
them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro.nn import PyroParam
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from pyro_bdl.distributions.copies import moved_like
from pyro_bdl.program.trace import prior_factor
from pyro_bdl.utils.module_state import device_of
from pyro_bdl.utils.validation import real_number


@dataclass(frozen=True)
class Hyperprior:
    """A positive scale that is set to a number under a prior of its own, and not sampled.

    It is a ``PyroParam`` theta together with the term log p(theta) of the log prior, which joins
    every objective that theta is tuned by: the evidence (type-II MAP) or the loss of SVI.

    :param distribution: p(theta), over positive numbers.
    :param start: where theta starts; the distribution's mean by default, or its median.
    """

    distribution: Any
    start: float | None = None

    def __post_init__(self) -> None:
        if self.start is not None:
            real_number(self.start, "start")

    @property
    def parameter(self) -> PyroParam:
        """The parameter theta."""
        value = self.distribution.mean if self.start is None else self.start
        start = torch.as_tensor(value, device="cpu").detach().clone()
        if not bool(torch.isfinite(start).all()):  # a HalfCauchy has no mean
            start = self.distribution.icdf(torch.full_like(start, 0.5)).detach()
        return PyroParam(start, constraint=constraints.positive)

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(theta), a scalar."""
        return moved_like(self.distribution, value).log_prob(value).sum()


Scale = float | PyroParam | Distribution | Hyperprior


class Scope:
    """The home of hyperparameters while priors are evaluated: here, plain statements of Pyro.

    The networks of a plate share what ``sample`` and ``param`` give; ``sample_for_each`` draws for
    every one of them.
    """

    def sample(self, name: str, distribution: Any) -> Tensor:
        return pyro.sample(name, distribution)

    def sample_for_each(self, name: str, distribution: Any) -> Tensor:
        return pyro.sample(name, distribution)

    def param(self, name: str, declaration: PyroParam) -> Tensor:
        return pyro.param(name, declaration.init_value, constraint=declaration.constraint)

    def add_log_prior(self, name: str, hyperprior: Hyperprior, value: Tensor) -> None:
        prior_factor(f"{name}.hyperprior", hyperprior.log_prob(value))


_scope: ContextVar[Scope] = ContextVar("scope", default=Scope())  # noqa: B039


def present_scope() -> Scope:
    """The current scope for the evaluation of priors."""
    return _scope.get()


@contextmanager
def hyperparameter_scope(scope: Scope) -> Iterator[None]:
    """Let priors inside the context take their hyperparameters from ``scope``."""
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)


def hyperparameter(value: Scale, name: str, like: Tensor) -> Tensor:
    """The current value of a number, a PyroParam or a hyperprior, with the dtype and device of
    ``like``."""
    if isinstance(value, Hyperprior):
        scope = _scope.get()
        number = scope.param(name, value.parameter)
        scope.add_log_prior(name, value, number)
        return number.to(like)
    if isinstance(value, PyroParam):
        return _scope.get().param(name, value).to(like)
    if isinstance(value, Distribution):
        return _scope.get().sample(name, moved_like(value, like))
    # filled, not copied: a copy would wait for the GPU
    return torch.full((), value, dtype=like.dtype, device=like.device)


def checked(value: Scale, argument: str) -> Scale:
    """Check a number, a PyroParam or a distribution for ``hyperparameter``, and return it.

    :raises TypeError: for other values.
    :raises ValueError: for a number that is not positive and finite.
    """
    if isinstance(value, PyroParam):
        start = value.init_value
        if not callable(start) and not isinstance(start, Tensor):
            return value._replace(init_value=torch.tensor(start, device="cpu"))
        return value
    if isinstance(value, Hyperprior):
        return value
    if not isinstance(value, int | float | Distribution):
        raise TypeError(
            f"{argument} must be a number, a PyroParam or a distribution, "
            f"got {type(value).__name__}"
        )
    return value if isinstance(value, Distribution) else real_number(value, argument)


def on_device(module: nn.Module, declaration: PyroParam) -> PyroParam:
    """The PyroParam with its initial value on a module's device."""
    start = declaration.init_value
    if not isinstance(start, Tensor):
        return declaration
    return declaration._replace(init_value=start.to(device=device_of(module)))

"""Marks of training steps: a guide may be drawn several times in one step."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_step: ContextVar[object | None] = ContextVar("pyro_bdl_training_step", default=None)


@contextmanager
def one_step() -> Iterator[None]:
    """Count all draws of guides inside the context as one step, such as those of several
    particles."""
    token = _step.set(object())
    try:
        yield
    finally:
        _step.reset(token)


def present_step() -> object | None:
    """An object that identifies the current step; None if every draw counts as a step."""
    return _step.get()

"""One step of a training, in which a guide may be drawn several times."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_step: ContextVar[object | None] = ContextVar("pyro_bdl_training_step", default=None)


@contextmanager
def one_step() -> Iterator[None]:
    """Count all draws of guides as those of one step: of several particles, or of a density."""
    token = _step.set(object())
    try:
        yield
    finally:
        _step.reset(token)


def present_step() -> object | None:
    """A mark of the step that is taken; None if every draw is a step."""
    return _step.get()

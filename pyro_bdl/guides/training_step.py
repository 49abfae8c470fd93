"""One step of a training, in which a guide may be drawn several times."""

from collections.abc import Iterator
from contextlib import contextmanager

_open: list[object] = []


@contextmanager
def one_step() -> Iterator[None]:
    """Inside, all draws of guides are of one step: of several particles, or to take a density."""
    _open.append(object())
    try:
        yield
    finally:
        _open.pop()


def present_step() -> object | None:
    """What stands for the step that is taken; None where every draw is a step."""
    return _open[-1] if _open else None

"""Ctrl-C that is not lost where an exception cannot get out."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def remembered_interrupts() -> Iterator[threading.Event]:
    """Inside, Ctrl-C sets the event as well as doing what it did before.

    The KeyboardInterrupt that Python raises is printed and dropped where it strikes inside of a
    callback of the garbage collector, of which JAX has one: who looks at the event from time to
    time stops all the same. Outside of the main thread, where no signal arrives, nothing sets it.
    """
    event = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield event
        return
    react = before

    def handler(number: int, frame: FrameType | None) -> None:
        event.set()
        react(number, frame)

    signal.signal(signal.SIGINT, handler)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)

"""Ctrl-C for work that must not be interrupted in the middle."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets instead of raising; a second Ctrl-C raises as
    usual.

    A KeyboardInterrupt is lost if it arrives inside a callback of the garbage collector, and JAX
    has such a callback. It could also leave a JAX computation running while its inputs are freed.
    Signals arrive in the main thread only; in other threads the event is never set.
    """
    event = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield event
        return
    react = before

    def handler(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            react(number, frame)
        event.set()

    signal.signal(signal.SIGINT, handler)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)

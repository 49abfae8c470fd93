"""Ctrl-C for work that may not be torn apart."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Let the first Ctrl-C set the event and raise nothing; a second one does what it did before.

    A KeyboardInterrupt would be dropped where it strikes inside of a callback of the garbage
    collector, of which JAX has one, and would leave a computation of JAX running while what it
    reads is taken away. Outside of the main thread, where no signal arrives, nothing sets it.
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

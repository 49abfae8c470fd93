"""Messages on stderr, and Ctrl-C."""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pyro_bdl.utils.progress import logger

INTERRUPTED = 130  # the exit code


@contextmanager
def told_on_stderr() -> Iterator[None]:
    """Print the logger's messages, from INFO on, as lines of ``pyro-bdl`` on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("pyro-bdl: %(message)s"))
    handler.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def gives_up_at_second_interrupt() -> Iterator[None]:
    """End the process at the second Ctrl-C, whatever it computes.

    The first one is handled as usual. The signals are counted by a thread, since the main thread
    does not react while it is inside a compiled function.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_count, args=(ours,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        theirs.close()
        thread.join()
        ours.close()


def _count(signals: socket.socket) -> None:
    """Wait for the numbers of signals; return when the other end is closed."""
    presses = 0
    while received := signals.recv(64):
        presses += received.count(signal.SIGINT)
        if presses > 1:
            os.write(2, b"\npyro-bdl: given up\n")
            os._exit(INTERRUPTED)

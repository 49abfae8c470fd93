"""Handlers of Pyro that refuse a second thread, and that leave nothing behind.

All threads share Pyro's stack of handlers, its parameter store and its validation. A handler of
this package refuses to be put on the stack while one of another thread is there, and refuses
statements of other threads. On exit it is taken off the stack in every case, where Pyro's own
handlers raise and stay if a handler of another thread lies above them.
"""

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK

_TWO_THREADS = "two threads run Pyro programs at the same time"
_THREADS = (
    "Pyro's handlers and its parameter store are not thread-safe: run one program at a time, with "
    "a lock around each step, or several in separate processes"
)
_changing = threading.Lock()  # the stack
_turn = threading.RLock()  # of calls that wait for each other
_P = ParamSpec("_P")
_T = TypeVar("_T")


def handlers() -> list[Any]:
    """The handlers on Pyro's stack, from the outermost one on."""
    return list(_PYRO_STACK)


def in_turn(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function, which waits while another thread is in one like it."""

    @functools.wraps(function)
    def waiting(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with _turn:
            return function(*args, **kwargs)

    return waiting


class OneThread(Messenger):
    """A handler for programs in one thread.

    :raises RuntimeError: on entry, at a statement or on exit, if another thread runs a program.
    """

    thread: threading.Thread | None = None  # inside the context; None under torch.compile

    def __enter__(self) -> Any:
        if torch.compiler.is_compiling():  # one thread, and it cannot follow this
            return super().__enter__()
        thread = threading.current_thread()
        with _changing:
            for handler in handlers():
                if not isinstance(handler, OneThread) or handler.thread in (None, thread):
                    continue
                if handler.thread.is_alive():
                    raise RuntimeError(f"{_TWO_THREADS}: {_THREADS}")
                _PYRO_STACK.remove(handler)  # its thread ended inside
            super().__enter__()
            self.thread = thread
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.thread is None:
            super().__exit__(kind, error, trace)
            return
        self.thread = None
        with _changing:
            if _PYRO_STACK[-1:] == [self]:
                _PYRO_STACK.pop()
                return
            place = next((n for n, h in enumerate(_PYRO_STACK) if h is self), None)
            if place is not None:  # after an error with all above, which Pyro may have left there
                del _PYRO_STACK[place : place + 1 if kind is None else None]
        if place is None or kind is None:
            raise RuntimeError(f"{_TWO_THREADS}: {_THREADS}") from error

    def _process_message(self, msg: Any) -> None:
        self.check_thread(msg)
        super()._process_message(msg)

    def check_thread(self, msg: Any) -> None:
        """Refuse a statement of another thread."""
        if torch.compiler.is_compiling() or self.thread is None:
            return
        if self.thread is not threading.current_thread():
            raise RuntimeError(
                f"{_TWO_THREADS} (the statement '{msg['name']}' is of another thread than the "
                f"program that runs): {_THREADS}"
            )


class Hidden(OneThread, BlockMessenger):
    """A context whose statements no outer handler sees."""

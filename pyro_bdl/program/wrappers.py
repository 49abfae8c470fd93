"""Programs that run another program inside a context."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn


class Wrapped(nn.Module):
    """A program that runs inside a context, with the same parameters and modules.

    :param model: the program.
    """

    def __init__(self, model: Callable) -> None:
        super().__init__()
        self.model = model

    def context(self) -> AbstractContextManager:
        """Return the context of one run."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.context():
            return self.model(*args, **kwargs)


class Handled(Wrapped):
    """A program under a Pyro handler."""

    def __init__(self, model: Callable, handler: AbstractContextManager) -> None:
        super().__init__(model)
        self.handler = handler

    def context(self) -> AbstractContextManager:
        return self.handler

"""Activation checkpointing (``torch.utils.checkpoint``) in programs whose weights are substituted.

A checkpointed function is computed again in the backward pass, after the substitution has been
undone. Therefore both of torch's checkpoint implementations are changed: inside a substitution they
repeat the computation with the same substitution. Without a substitution they are unchanged.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import checkpoint as torch_checkpoint

Substitution = Callable[[], AbstractContextManager]

_active: ContextVar[tuple[Substitution, ...]] = ContextVar("pyro_bdl_substitutions", default=())


@contextmanager
def kept_for_recomputation(substitution: Substitution) -> Iterator[None]:
    """Let functions that are checkpointed inside the context be computed again under
    ``substitution()``."""
    token = _active.set((*_active.get(), substitution))
    try:
        yield
    finally:
        _active.reset(token)


def _again(function: Callable, substitutions: tuple[Substitution, ...]) -> Callable:
    def recompute(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for substitution in substitutions:
                stack.enter_context(substitution())
            return function(*args, **kwargs)

    return recompute


def _stores_everything() -> bool:
    """Return whether all intermediate results must be stored instead of computed again.

    Tensors inside functorch transforms cannot be packed, and a tracer would record the second
    computation at the wrong position.
    """
    return torch._C._are_functorch_transforms_active() or get_proxy_mode() is not None


def _around_call() -> Iterator[None]:
    yield


def _without_reentering(original: Callable) -> Callable:
    """Wrap torch's non-reentrant checkpoint, which is a generator around the call of the
    function."""

    def generator(function: Callable, *args: Any, **kwargs: Any) -> Iterator[None]:
        substitutions = _active.get()
        if not substitutions:
            return original(function, *args, **kwargs)
        if _stores_everything():
            return _around_call()
        return original(_again(function, substitutions), *args, **kwargs)

    return generator


class _Reentering:
    """Replacement of torch's reentrant checkpoint inside a substitution by the non-reentrant one.

    The reentrant one gives no gradients in tensors that are neither arguments nor leaves, such as
    substituted weights.
    """

    def __init__(self, original: Any) -> None:
        self.original = original

    def apply(self, function: Callable, preserve_rng_state: bool, *args: Any) -> Any:
        if not _active.get():
            return self.original.apply(function, preserve_rng_state, *args)
        return torch_checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


# torch 2.15 has moved this function's body into another function.
_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(torch_checkpoint, f"{_GENERATOR}_impl"):
    _GENERATOR = f"{_GENERATOR}_impl"
setattr(torch_checkpoint, _GENERATOR, _without_reentering(getattr(torch_checkpoint, _GENERATOR)))
torch_checkpoint.CheckpointFunction = _Reentering(  # type: ignore[assignment, misc]
    torch_checkpoint.CheckpointFunction
)

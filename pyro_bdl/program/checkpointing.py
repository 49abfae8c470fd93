"""Activation checkpointing (``torch.utils.checkpoint``) in programs whose weights are substituted.

A checkpointed part is computed again in the backward pass, when the substitution is undone. So
torch's two ways of checkpointing are told, while a substitution holds, to compute the part with the
same substitution again. Where none holds, they do what they always do.
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
    """Parts that are checkpointed inside are computed again under ``substitution()``."""
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
    """Return whether all that is computed must be stored.

    Tensors that functorch transforms cannot be packed, and a tracer would not record a second
    computation at the right place.
    """
    return torch._C._are_functorch_transforms_active() or get_proxy_mode() is not None


def _around_call() -> Iterator[None]:
    yield


def _without_reentering(original: Callable) -> Callable:
    """torch's non-reentrant checkpoint, a generator around the call of the function."""

    def generator(function: Callable, *args: Any, **kwargs: Any) -> Iterator[None]:
        substitutions = _active.get()
        if not substitutions:
            return original(function, *args, **kwargs)
        if _stores_everything():
            return _around_call()
        return original(_again(function, substitutions), *args, **kwargs)

    return generator


class _Reentering:
    """torch's reentrant checkpoint. It has no gradients of tensors that are not arguments, as
    substituted weights are, unless they are leaves: so the other way takes its place."""

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


# torch 2.15 has put the work of this function into another one.
_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(torch_checkpoint, f"{_GENERATOR}_impl"):
    _GENERATOR = f"{_GENERATOR}_impl"
setattr(torch_checkpoint, _GENERATOR, _without_reentering(getattr(torch_checkpoint, _GENERATOR)))
torch_checkpoint.CheckpointFunction = _Reentering(  # type: ignore[assignment, misc]
    torch_checkpoint.CheckpointFunction
)

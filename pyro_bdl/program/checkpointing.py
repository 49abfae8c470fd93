"""Activation checkpointing (``torch.utils.checkpoint``) in programs whose weights are substituted.

A checkpointed part is computed again in the backward pass, when the substitution is undone. So
torch's two ways of checkpointing are replaced, while a substitution holds, by ones that compute the
part with the same substitution again. Torch has no hook for this: the two functions in its module
are exchanged when the first substitution begins and put back when the last one ends. Threads
without a substitution checkpoint as ever meanwhile.
"""

import threading
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
        with _installed():
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
    """torch's reentrant checkpoint. It has no gradients of tensors that are no arguments, as
    substituted weights are, unless they are leaves: so the other way takes its place.

    :param original: what stands in torch's module otherwise.
    :param generator: what stands there for the other way.
    """

    def __init__(self, original: Any, generator: Callable) -> None:
        self.original, self.generator = original, generator
        self.users = 0  # substitutions that hold

    def apply(self, function: Callable, preserve_rng_state: bool, *args: Any) -> Any:
        if not _active.get():
            return self.original.apply(function, preserve_rng_state, *args)
        return torch_checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(torch_checkpoint, f"{_GENERATOR}_impl"):  # where torch 2.15 has put the work
    _GENERATOR = f"{_GENERATOR}_impl"

_exchange = threading.Lock()


@contextmanager
def _installed() -> Iterator[None]:
    """torch's ways of checkpointing are ours. Under ``torch.compile``, which has its own way,
    nothing changes."""
    if torch.compiler.is_compiling():
        yield
        return
    module: Any = torch_checkpoint
    with _exchange:
        if not isinstance(module.CheckpointFunction, _Reentering):
            generator = getattr(module, _GENERATOR)
            module.CheckpointFunction = _Reentering(module.CheckpointFunction, generator)
            setattr(module, _GENERATOR, _without_reentering(generator))
        reentering = module.CheckpointFunction
        reentering.users += 1
    try:
        yield
    finally:
        with _exchange:
            reentering.users -= 1
            if not reentering.users:
                module.CheckpointFunction = reentering.original
                setattr(module, _GENERATOR, reentering.generator)

"""Contexts that change a program's torch modules for a while: evaluation mode, kept buffers, hooks.

They act only on the modules that the program holds (``modules_of``), so that networks in other
threads are not affected.
"""

import contextlib
import functools
import random
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyro_bdl.utils.random_state import own_randomness

_MOST_ENTRIES = 1000  # longer containers are taken for data and not searched for modules
_CONTAINERS = (list, tuple, set, frozenset, dict)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_LIBRARIES = ("site-packages", "dist-packages", "pyro_bdl")  # in the paths of files
_BOOKKEEPING = vars(nn.Module()).keys()  # attributes that each module has
_MISSING: Any = object()


def device_of(module: nn.Module) -> torch.device | None:
    """The device of a module's first tensor; None if it has no tensor."""
    first = next(chain(module.parameters(), module.buffers()), None)
    return None if first is None else first.device


def modules_of(*programs: Any) -> list[nn.Module]:
    """The modules that programs hold, each before its parts.

    These are submodules, modules in the attributes of modules and of methods' objects, in closures,
    defaults and arguments of functions and ``partial``s, in lists and dicts among them, and in the
    global variables that a function outside of installed libraries names; and those of the
    functions found there. Attributes of other objects are searched one level deep.

    :param programs: functions, modules, methods, or containers of them.
    """
    modules: list[nn.Module] = []
    seen: dict[int, Any] = {}  # holds the objects too, so that no id is reused
    pending = [_opened(program) for program in reversed(programs)]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, nn.Module):
            modules.append(value)
        holders = (nn.Module, *_CONTAINERS, *_FUNCTIONS)
        pending += [part for part in reversed(_parts(value)) if isinstance(part, holders)]
    return modules


def _parts(value: Any) -> list[Any]:
    """The objects that a module, a container or a function holds."""
    if isinstance(value, nn.Module):
        own = vars(value).keys() - _BOOKKEEPING
        return [*value.children(), *(vars(value)[name] for name in sorted(own))]
    if isinstance(value, _CONTAINERS):
        if len(value) > _MOST_ENTRIES:
            return []
        return list(value.values() if isinstance(value, dict) else value)
    if isinstance(value, types.MethodType):
        return [_opened(value.__self__), value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    held = [getattr(value, "__wrapped__", None), *(value.__defaults__ or ())]
    held += (value.__kwdefaults__ or {}).values()
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):  # a variable without a value yet
            held.append(cell.cell_contents)
    if not any(library in value.__code__.co_filename for library in _LIBRARIES):
        held += [value.__globals__.get(name) for name in _names(value.__code__)]
    return [_opened(part) for part in held]


def _names(code: types.CodeType) -> list[str]:
    """The names that a function and the functions inside it look up."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return [*code.co_names, *(name for part in inner for name in _names(part))]


def _opened(value: Any) -> Any:
    """The attributes of an object of a user's class; any other value itself."""
    if isinstance(value, (nn.Module, type, types.ModuleType, *_CONTAINERS, *_FUNCTIONS)):
        return value
    return list(getattr(value, "__dict__", {}).values())


@contextmanager
def evaluation_mode(*programs: Any) -> Iterator[None]:
    """Put all modules that programs hold into evaluation mode; their modes are restored on exit.

    Running statistics do not move meanwhile. Modules of ``torch.compile`` run uncompiled.

    :param programs: as in ``modules_of``.
    """
    with evaluating(modules_of(*programs)):
        yield


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode, as ``evaluation_mode`` does."""
    modes = [module.training for module in modules]
    with as_written(modules):
        for module in modules:
            module.training = False
        try:
            yield
        finally:
            for module, training in zip(modules, modes, strict=True):
                module.training = training


@contextmanager
def preserved_buffers(*programs: Any) -> Iterator[None]:
    """Restore the buffers of modules in training mode, such as BatchNorm's running statistics, on
    exit.

    :param programs: as in ``modules_of``.
    """
    restore = saved_buffers(module for module in modules_of(*programs) if module.training)
    try:
        yield
    finally:
        restore()


def saved_buffers(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Copy the buffers that modules hold themselves; return a function that puts them back."""
    saved = [
        (buffer, buffer.detach().clone())
        for module in modules
        for buffer in module.buffers(recurse=False)
    ]

    def restore() -> None:
        for buffer, value in saved:
            buffer.data.copy_(value)

    return restore


@contextmanager
def without_side_effects(
    modules: Iterable[nn.Module], tensors: Iterable[Tensor] = ()
) -> Iterator[None]:
    """Run without side effects: random states and buffers are restored on exit.

    Random numbers of Python and numpy follow a fixed seed: a trace takes them for constants.

    :param modules: the modules whose buffers are restored.
    :param tensors: other tensors to restore.
    """
    saved = [(tensor, tensor.detach().clone()) for tensor in tensors]
    restore = saved_buffers(modules)
    try:
        with own_randomness():
            random.seed(0)
            np.random.seed(0)
            yield
    finally:
        restore()
        for tensor, value in saved:
            tensor.data.copy_(value)


@contextmanager
def as_written(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run modules of ``torch.compile`` uncompiled.

    Hooks, tracers and transforms of ``torch.func`` then see their operations.
    """
    saved: list[tuple[nn.Module, str, Any]] = []

    def put(module: nn.Module, name: str, value: Any) -> None:
        saved.append((module, name, module.__dict__.get(name, _MISSING)))
        module.__dict__[name] = value

    for module in modules:
        if "dynamo_ctx" in module.__dict__:  # torch.compile(module)
            put(module, "forward", module._orig_mod)
        if module.__dict__.get("_compiled_call_impl") is not None:
            put(module, "_compiled_call_impl", None)
    try:
        yield
    finally:
        for module, name, value in reversed(saved):
            if value is _MISSING:
                del module.__dict__[name]
            else:
                module.__dict__[name] = value


@contextmanager
def hooked(
    modules: Iterable[nn.Module],
    before: Callable[..., Any],
    after: Callable[..., Any] | None = None,
    *,
    kind: type[nn.Module] = nn.Module,
) -> Iterator[None]:
    """Run modules uncompiled, with a hook before and a hook after each call of modules of one
    class.

    :param before: a forward pre-hook.
    :param after: a forward hook, if any.
    :param kind: the class.
    """
    modules = list(modules)
    hooks = []
    with as_written(modules):
        try:
            for module in modules:
                if isinstance(module, kind):
                    hooks.append(module.register_forward_pre_hook(before))
                    if after is not None:
                        hooks.append(module.register_forward_hook(after, always_call=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Turn ``torch.inference_mode`` off, so that new tensors can be trained."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def vmappable() -> Iterator[None]:
    """Let attention run as plain operators, which ``vmap`` and tracing can follow."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)

"""Contexts that change a program's torch modules for a while: evaluation mode, kept buffers, hooks.

They act only on the modules that the program holds (``modules_of``), so that networks in other
threads are not affected.
"""

import functools
import inspect
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_MOST_ENTRIES = 1000  # longer containers are taken for data and not searched for modules
_PLAIN = {type(None), bool, int, float, complex, str, bytes, Tensor, nn.Parameter, torch.Size}
_TABLES = {dict, OrderedDict, list, tuple, set}
_CONTAINERS = (list, tuple, set, frozenset)
_HOSTS = {"pyro", "pyro_bdl"}  # their objects may hold programs; their global variables do not
_MISSING: Any = object()


def device_of(module: nn.Module) -> torch.device | None:
    """The device of a module's first tensor; None if it has no tensor."""
    first = next(chain(module.parameters(), module.buffers()), None)
    return None if first is None else first.device


def modules_of(*programs: Any) -> list[nn.Module]:
    """The modules that programs hold.

    They are found among submodules, attributes, arguments, closures, handlers, lists and dicts, and
    the global variables that functions of the program use.

    :param programs: functions, modules, methods, or containers of them.
    """
    home = {_package(program) for program in programs} | {"__main__"}
    found: list[nn.Module] = []
    seen: dict[int, Any] = {}  # holds the objects too, so that no id is reused
    pending: list[Any] = list(reversed(programs))
    while pending:
        value = pending.pop()
        if type(value) in _PLAIN or id(value) in seen or isinstance(value, Tensor):
            continue
        seen[id(value)] = value
        if isinstance(value, nn.Module):
            found.append(value)
        pending.extend(reversed(list(_held(value, home))))
    return found


def _held(value: Any, home: set[str]) -> Iterable[Any]:
    """The objects that an object holds."""
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= _MOST_ENTRIES else ()
    if isinstance(value, _CONTAINERS):
        return value if len(value) <= _MOST_ENTRIES else ()
    if isinstance(value, types.FunctionType):
        return _held_by_function(value, home)
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.ModuleType):
        return ()
    if isinstance(value, type):
        bases = (base for base in value.__mro__ if not _is_foreign(_root(base.__module__), home))
        methods = chain.from_iterable(vars(base).values() for base in bases)
        return [method for method in methods if isinstance(method, types.FunctionType)]
    package = _root(type(value).__module__)
    attributes = [part for part in getattr(value, "__dict__", {}).values() if _may_hold(part)]
    parts = value.children() if isinstance(value, nn.Module) else ()
    if not _is_foreign(package, home):
        return chain(parts, attributes, (type(value),))
    return chain(parts, attributes) if package in _HOSTS or isinstance(value, nn.Module) else ()


def _may_hold(value: Any) -> bool:
    return type(value) not in _PLAIN and (type(value) not in _TABLES or len(value) > 0)


def _held_by_function(function: types.FunctionType, home: set[str]) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a closure variable without a value yet
            continue
    yield function.__defaults__
    yield function.__kwdefaults__
    yield function.__dict__
    if _is_foreign(_package(function), home):
        return
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        pending += [constant for constant in code.co_consts if inspect.iscode(constant)]
        for name in code.co_names:
            value = function.__globals__.get(name)
            yield value
            if isinstance(value, types.ModuleType) and not _is_foreign(_root(value.__name__), home):
                yield from (vars(value).get(attribute) for attribute in code.co_names)


def _package(value: Any) -> str:
    """The top-level package in which a function or an object's class is defined."""
    value = inspect.unwrap(value) if inspect.isfunction(value) else value
    owner = value if isinstance(value, types.FunctionType | types.MethodType) else type(value)
    return _root(getattr(owner, "__module__", None) or "builtins")


def _root(name: str) -> str:
    return name.partition(".")[0]


def _is_foreign(package: str, home: set[str]) -> bool:
    """Return whether a package is a library, whose objects are not searched for programs."""
    if package in _HOSTS or package in sys.stdlib_module_names:
        return True
    if package in home:
        return False
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


@contextmanager
def evaluation_mode(*programs: Any) -> Iterator[None]:
    """Put all modules that programs hold into evaluation mode; their modes are restored on exit.

    Running statistics do not move meanwhile. Modules of ``torch.compile`` run uncompiled.

    :param programs: as in ``modules_of``.
    """
    modules = modules_of(*programs)
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

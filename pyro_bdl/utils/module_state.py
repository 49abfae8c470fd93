"""Contexts that change a program's torch modules for a while: evaluation mode, kept buffers, hooks.

The modules of a program are those that it calls, and the program itself if it is a module, each
with its parts. ``watching_calls``, around each run of a program, shows the contexts that are open
which modules this thread calls: each is changed before its forward pass, and is as it was on exit
of the context. Nothing is searched for, and networks in other threads are not affected.
"""

import random
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook

from pyro_bdl.utils.autograd import is_transformed
from pyro_bdl.utils.random_state import own_randomness

_MISSING: Any = object()

_Undo = Callable[[], Any]


def device_of(*owners: Any) -> torch.device | None:
    """The device of the first tensor of the modules among ``owners``; None if they have none."""
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    tensors = (chain(module.parameters(), module.buffers()) for module in modules)
    first = next(chain.from_iterable(tensors), None)
    return None if first is None else first.device


# -------------------------------------------------------------------------- modules that are called


class Modules:
    """A set of modules, each before its parts, in the order in which they were added.

    :param owners: as in ``add``.
    """

    def __init__(self, *owners: Any) -> None:
        self._by_id: dict[int, nn.Module] = {}  # modules may compare by value
        for owner in owners:
            self.add(owner)

    def add(self, owner: Any) -> list[nn.Module]:
        """Add a module with its parts, the module of a bound method, or other ``Modules``.

        A guide brings those of its program, its ``program_modules``.

        :param owner: any object; others, such as functions and data, add nothing.
        :returns: those that are new.
        """
        if isinstance(owner, types.MethodType):
            owner = owner.__self__
        if not isinstance(owner, nn.Module | Modules):
            return []
        parts = owner if isinstance(owner, Modules) else owner.modules()
        parts = chain(parts, getattr(owner, "program_modules", ()))
        new = [part for part in parts if id(part) not in self._by_id]
        self._by_id.update((id(part), part) for part in new)
        return new

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(list(self._by_id.values()))

    def __contains__(self, module: object) -> bool:
        return id(module) in self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    def __reduce__(self) -> tuple:
        return Modules, tuple(self)


class _Context:
    """A context that changes modules.

    :param change: changes a module, and returns what takes the change back, or None. It is called
        with the arguments of the module's call where the module is met by it, else with None.
    :param owners: see ``changed``.
    """

    def __init__(self, change: Callable[[nn.Module, Any], _Undo | None], owners: tuple) -> None:
        self.change, self.known = change, Modules()
        self.growing = [owner for owner in owners if isinstance(owner, Modules)]
        self.compiled = False  # whether a module is of ``torch.compile``
        self.undo = ExitStack()

    def take(self, owner: Any, args: Any = None) -> None:
        """Change the modules of an owner that are new.

        :param args: those of its call.
        """
        for module in self.known.add(owner):
            self.compiled = self.compiled or "dynamo_ctx" in vars(module)
            undo = self.change(module, args if module is owner else None)
            if undo is not None:
                self.undo.callback(undo)

    def called(self, module: nn.Module, args: Any) -> None:
        if module not in self.known:
            for modules in self.growing:
                modules.add(module)
            self.take(module, args)


_open: ContextVar[tuple[_Context, ...]] = ContextVar("pyro_bdl_module_contexts", default=())


@contextmanager
def changed(change: Callable[[nn.Module, Any], _Undo | None], *owners: Any) -> Iterator[Modules]:
    """Change the modules of a program, those that are called only inside included.

    :param change: changes a module, see ``_Context``.
    :param owners: what is known of the modules: modules, methods of modules, and ``Modules``, to
        which those that are called are added.
    :returns: the modules that were changed so far.
    """
    context = _Context(change, owners)
    with context.undo:
        for owner in owners:
            context.take(owner)
        _open.set((*_open.get(), context))
        try:
            yield context.known
        finally:  # by identity, since generators may end in another order
            _open.set(tuple(other for other in _open.get() if other is not context))


def _note(module: nn.Module, args: Any) -> None:
    for context in _open.get():  # none in other threads; outer contexts first
        context.called(module, args)


@contextmanager
def watching_calls(*, first: bool = False) -> Iterator[None]:
    """Show the contexts that are open the modules that are called, for the length of one run.

    :param first: whether it is the first run of a program.
    """
    if torch.compiler.is_compiling() or not _open.get():
        yield
        return
    with ExitStack() as stack:
        if first or any(context.compiled or not context.known for context in _open.get()):
            stack.enter_context(_without_warning_of_hooks())
        stack.callback(register_module_forward_pre_hook(_note).remove)
        yield


@contextmanager
def _without_warning_of_hooks() -> Iterator[None]:
    """Let modules of ``torch.compile`` not warn of the hook."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using `torch.compile")
        yield


def modules_in_sight() -> Modules:
    """The modules that the contexts which are open know."""
    return Modules(*(context.known for context in _open.get()))


# ------------------------------------------------------------------------------------- contexts


def evaluation_mode(*owners: Any) -> AbstractContextManager[Modules]:
    """Put all modules of a program into evaluation mode; their modes are restored on exit.

    Running statistics do not move meanwhile. Modules of ``torch.compile`` run uncompiled, from the
    run after the one that first meets them.

    :param owners: as in ``changed``.
    """
    return changed(_evaluate, *owners)


def _evaluate(module: nn.Module, args: Any) -> _Undo:
    training, compiled = module.training, _uncompile(module)
    module.training = False

    def restore() -> None:
        module.training = training
        compiled()

    return restore


def preserved_buffers(*owners: Any) -> AbstractContextManager[Modules]:
    """Restore the buffers of modules in training mode, such as BatchNorm's running statistics, on
    exit.

    :param owners: as in ``changed``.
    """
    return changed(lambda module, args: _save(module) if module.training else None, *owners)


def _save(module: nn.Module) -> _Undo | None:
    if is_transformed():  # inside vmap, values of draws may stand in the places of buffers
        return None
    return saved_buffers([module])


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


def uncompiled(*owners: Any) -> AbstractContextManager[Modules]:
    """Run modules of ``torch.compile`` uncompiled.

    Hooks, tracers and transforms of ``torch.func`` then see their operations.

    :param owners: as in ``changed``.
    """
    return changed(lambda module, args: _uncompile(module), *owners)


def _uncompile(module: nn.Module) -> _Undo:
    state = vars(module)
    values: dict[str, Any] = {}
    if "dynamo_ctx" in state:  # torch.compile(module)
        values["forward"] = module._orig_mod
    if state.get("_compiled_call_impl") is not None:
        values["_compiled_call_impl"] = None
    before = {name: state.get(name, _MISSING) for name in values}
    state.update(values)

    def restore() -> None:
        for name, value in before.items():
            if value is _MISSING:
                del state[name]
            else:
                state[name] = value

    return restore


def hooked(
    before: Callable[..., Any],
    after: Callable[..., Any] | None,
    *owners: Any,
    kind: type[nn.Module] = nn.Module,
) -> AbstractContextManager[Modules]:
    """Run modules uncompiled, with a hook before and a hook after each call of modules of one
    class.

    :param before: a forward pre-hook.
    :param after: a forward hook, if any.
    :param owners: as in ``changed``.
    :param kind: the class.
    """

    def hook(module: nn.Module, args: Any) -> _Undo:
        undo = ExitStack()
        undo.callback(_uncompile(module))
        if isinstance(module, kind):
            undo.callback(module.register_forward_pre_hook(before).remove)
            if after is not None:
                undo.callback(module.register_forward_hook(after, always_call=True).remove)
            if args is not None:  # of the call that is under way, whose hooks are read already
                before(module, args)
        return undo.close

    return changed(hook, *owners)


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

"""PyroModules that own their parameters.

Pyro keeps parameters in one global store under the module's name, and the name of a root module is
its class: a second module of a class silently gets the first one's values. A module with
``OwnParameters`` has a unique name, keeps it inside other modules, and removes its entries from the
store when it is deleted.

The name starts with the module's kind and is the same in every process. Modules of the same kind
that exist at the same time must not share parameters, so they are numbered in the order of their
creation.
"""

import copy
import itertools
import threading
import weakref
from typing import Any

import pyro
import torch
from pyro.nn import PyroModule

_named: weakref.WeakValueDictionary[str, PyroModule] = weakref.WeakValueDictionary()
_naming = threading.Lock()


def _free_name(kind: str, module: PyroModule) -> str:
    """The kind, with a number if another existing module has that name."""
    with _naming:
        for number in itertools.count():
            name = kind if number == 0 else f"{kind}_{number}"
            if _named.setdefault(name, module) is module:
                return name
    raise AssertionError("there is always another number")


def _forget(name: str) -> None:
    store = pyro.get_param_store()
    for key in [key for key in store.keys() if key.startswith(name + ".")]:  # noqa: SIM118
        del store[key]


def _pyro_modules(module: PyroModule) -> list[PyroModule]:
    return [inner for inner in module.modules() if isinstance(inner, PyroModule)]


class OwnParameters(PyroModule):
    """A PyroModule with a unique name in Pyro's parameter store."""

    def _name_of_kind(self) -> str:
        """The name without a number."""
        return type(self).__name__

    def _take_name(self) -> None:
        name = _free_name(self._name_of_kind(), self)
        self._own_name = name
        self._pyro_name = name
        for inner in _pyro_modules(self):
            inner._pyro_context.used = False  # otherwise Pyro refuses to rename a copy
        for key, module in self._modules.items():
            if isinstance(module, PyroModule):
                module._pyro_name = ""
                module._pyro_set_supermodule(f"{name}.{key}", self._pyro_context)
        weakref.finalize(self, _forget, name).atexit = False

    def _rename(self) -> None:
        """Update the name after the module's kind has changed, before it has parameters, also
        during a call."""
        contexts = {m._pyro_context: m._pyro_context.used for m in _pyro_modules(self)}
        with _naming:
            del _named[self._own_name]
        self._take_name()
        for context, used in contexts.items():
            context.used = used

    def __init__(self) -> None:
        super().__init__()
        self._take_name()

    def _pyro_set_supermodule(self, name: str, context: Any) -> None:
        super()._pyro_set_supermodule(self._own_name, context)

    def _follow_store(self, name: str) -> None:
        """Use a parameter's value from Pyro's store, which may have been loaded from a file.

        Pyro does this for ``PyroParam`` only. Otherwise an optimizer would change the store's
        tensor, while the module keeps its own.
        """
        parameter, store = self._parameters.get(name), pyro.get_param_store()
        if parameter is None or not self._pyro_context.active:
            return
        key = self._pyro_get_fullname(name)
        stored = store._params.get(key)
        if stored is None or stored is parameter:
            return
        if stored.shape != parameter.shape:
            raise ValueError(
                f"the parameter '{key}' has shape {tuple(stored.shape)} in Pyro's store, but "
                f"{tuple(parameter.shape)} here: it belongs to another program"
            )
        with torch.no_grad():
            parameter.copy_(stored)
        store._params[key] = parameter
        store._param_to_name[parameter] = key

    def _shared_on_copy(self) -> tuple[str, ...]:
        """Attributes that a deep copy shares with its original."""
        return ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        shared = self._shared_on_copy()
        state = {
            key: value if key in shared else copy.deepcopy(value, memo)
            for key, value in self.__dict__.items()
        }
        result.__dict__.update(state)
        result._take_name()
        return result

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._take_name()

"""Guards: conditions under which a graph is still valid for its program."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pyro
from torch import Tensor, nn

from pyro_bdl.tracing.variables import variables

_MISSING = object()
_RESULT = "last_noise"  # an attribute of guides that runs and graphs set
_PLAIN = (bool, int, float, str, type(None))


class HeldValue(NamedTuple):
    """One entry of a module's dictionaries, or a variable of a function.

    :param table: a dict or an object with the same methods.
    :param kind: the class of the module, or the function's name, for messages.
    """

    table: Any
    key: str
    value: Any
    kind: str

    def holds(self) -> bool:
        now = self.table.get(self.key, _MISSING)
        if now is self.value:
            return True
        return type(now) is type(self.value) and isinstance(now, _PLAIN) and now == self.value


class Snapshot:
    """The attributes of modules, and the variables of functions, before a run.

    :param callables: the program and its guide, whose variables are read.
    :param modules: the modules of both.
    """

    def __init__(self, callables: Iterable[Callable], modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self.recorded = [*_variables(callables, modules), *entries(modules)]

    def change(self) -> HeldValue | None:
        """The first value that has changed, or None."""
        return next((entry for entry in self.recorded if not entry.holds()), None)


def _variables(callables: Iterable[Callable], modules: Iterable[nn.Module]) -> list[HeldValue]:
    """The variables that the functions of a program and of its modules close over."""
    return [HeldValue(*variable) for variable in variables(callables, modules)]


def entries(modules: Iterable[nn.Module]) -> list[HeldValue]:
    """The tensors, submodules, numbers and strings that modules hold as attributes."""
    found = []
    for module in modules:
        kind = type(module).__name__
        for table in (module._parameters, module._buffers, module._modules):
            found += [HeldValue(table, key, value, kind) for key, value in table.items()]
        found += [
            HeldValue(module.__dict__, key, value, kind)
            for key, value in module.__dict__.items()
            if isinstance(value, (*_PLAIN, Tensor)) and key != _RESULT
        ]
    return found


class Guards:
    """The conditions under which a graph is still valid for the program.

    Unchanged must be: attributes of modules, variables of functions, dtypes and devices of
    parameters, the parameters in Pyro's store, and the values of constants.

    :param callables: the program and its guide.
    :param modules: the modules that were traced.
    :param parameters: names in Pyro's store, and the tensors that an optimizer changes.
    :param leaves: the tensors in which the gradient is taken.
    :param constants: tensors whose values went into the graph.
    """

    def __init__(
        self,
        callables: Iterable[Callable],
        modules: Iterable[nn.Module],
        parameters: dict[str, Tensor],
        leaves: Iterable[Tensor],
        constants: Iterable[Tensor],
    ) -> None:
        modules = list(modules)
        self.entries = entries(modules) + _variables(callables, modules)
        self.sizes = [
            (table, len(table), type(module).__name__)
            for module in modules
            for table in (module._parameters, module._buffers, module._modules)
        ]
        self.parameters = parameters
        self.leaves = [(leaf, leaf.dtype, leaf.device) for leaf in leaves]
        self.constants = [(c, c._version) for c in constants if not c.is_inference()]

    def broken(self) -> str | None:
        """A description of the first change, or None."""
        for table, key, value, _ in self.entries:
            if table.get(key, _MISSING) is not value:
                changed = (entry for entry in self.entries if not entry.holds())
                entry = next(changed, None)
                if entry is not None:
                    return f"'{entry.key}' of {entry.kind}"
                break  # another object, but equal
        for table, size, kind in self.sizes:
            if len(table) != size:
                return f"what {kind} holds"
        stored = pyro.get_param_store()._params
        for name, parameter in self.parameters.items():
            if stored.get(name) is not parameter:
                return f"the parameter '{name}' in Pyro's store"
        for leaf, dtype, device in self.leaves:
            if leaf.dtype is not dtype or leaf.device != device or not leaf.requires_grad:
                return "dtype, device or requires_grad of a parameter"
        for constant, version in self.constants:
            if constant._version != version:
                return f"a tensor of shape {tuple(constant.shape)}, in place"
        return None

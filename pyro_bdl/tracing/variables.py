"""The Python variables that a program's functions use: closures and globals."""

import dis
import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor, nn

_FOLDERS = [Path(__file__).parents[1], *(Path(str(p.__file__)).parent for p in (torch, pyro))]
_LIBRARIES = ("<string>", "<frozen", *(f"{folder}{os.sep}" for folder in _FOLDERS))
_MISSING = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class NamedValue(NamedTuple):
    """A name in a table of values.

    :param table: a dict, or a closure cell that is read like a dict.
    :param place: a description of its location, for messages.
    """

    table: Any
    key: str
    value: Any
    place: str


class _Cell:
    """A cell of a closure, read like a dict."""

    def __init__(self, cell: CellType) -> None:
        self._cell = cell

    def get(self, key: str, default: Any) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # an empty cell
            return default


def variables(callables: Iterable[Any], modules: Iterable[nn.Module]) -> list[NamedValue]:
    """The variables that functions use: closure cells, globals, entries of dicts, attributes of
    objects.

    Functions among them are searched too.

    :param callables: functions such as a program.
    :param modules: modules whose methods and functions are searched too.
    """
    walk = _VariableSearch()
    for function in callables:
        walk.follow(function)
    for module in modules:
        walk.method(module, "forward")
        for value in list(vars(module).values()):
            walk.follow(value)
    return walk.found


class _VariableSearch:
    def __init__(self) -> None:
        self.found: list[NamedValue] = []
        self._seen: set[tuple[FunctionType, int]] = set()

    def follow(self, value: Any) -> None:
        """Read the variables of any callable."""
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.follow(part)
        elif isinstance(value, MethodType):
            self.method(value.__self__, value.__func__.__name__)
        elif isinstance(value, FunctionType):
            self.function(value, None)
        elif callable(value) and not isinstance(value, nn.Module | type):
            self.method(value, "__call__")

    def method(self, instance: Any, name: str) -> None:
        function = getattr(type(instance), name, None)
        if isinstance(function, FunctionType):
            self.function(function, instance)

    def function(self, function: FunctionType, instance: Any) -> None:
        """Read the variables of a function.

        :param instance: the object whose method it is; None for a plain function.
        """
        if (function, id(instance)) in self._seen:
            return
        self._seen.add((function, id(instance)))
        code, place = function.__code__, function.__qualname__
        is_library = code.co_filename.startswith(_LIBRARIES)
        looked_up = set(_names(code))
        names = {name for _, name in looked_up}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            value = _Cell(cell).get(name, _MISSING)
            if is_library:  # such as Pyro's wrapper of a program
                self.follow(value)
            elif name != "__class__":
                self.variable(NamedValue(_Cell(cell), name, value, place), names)
        if is_library:
            return
        named = {name for is_global, name in looked_up if is_global}
        for name in named & function.__globals__.keys():
            value = function.__globals__[name]
            self.variable(NamedValue(function.__globals__, name, value, place), names)
        if instance is not None:
            self.attributes(instance, type(instance).__name__, names)
            for name in names:
                self.method(instance, name)

    def variable(self, variable: NamedValue, names: set[str]) -> None:
        if not isinstance(variable.value, ModuleType):
            self.found.append(variable)
            self.follow(variable.value)
            self.attributes(variable.value, variable.key, names)

    def attributes(self, value: Any, place: str, names: set[str]) -> None:
        """Record the numbers, strings and tensors in a dict, or in an object that a function uses.

        Modules are handled elsewhere.
        """
        if isinstance(value, nn.Module | type | FunctionType):
            return
        table = value if type(value) is dict else getattr(value, "__dict__", None)
        if type(table) is not dict:
            return
        for key, entry in table.items():
            if isinstance(entry, (*_PLAIN, Tensor)) and (table is value or key in names):
                self.found.append(NamedValue(table, key, entry, place))


def _names(code: CodeType) -> Iterator[tuple[bool, str]]:
    """The names that a function and its inner functions look up, and whether they are globals."""
    for instruction in dis.get_instructions(code):
        if isinstance(instruction.argval, str):
            yield instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"), instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)

"""The variables that a program's functions name."""

import functools
from types import SimpleNamespace

import torch
from torch import nn

from pyro_bdl.tracing.variables import variables

NUMBER, UNUSED, loc = 1.0, 2.0, 3.0


def _helper(x):
    return x.loc * NUMBER


def _program(settings, table):
    factor = 2.0

    def program(x):
        inner = lambda y: _helper(y) * factor  # noqa: E731
        return inner(x) + settings.shift + table["word"]

    return program


def _found(callables, modules=()):
    return {(v.key, v.table.get(v.key, None)) for v in variables(callables, modules)}


def test_cells_globals_entries_and_attributes():
    settings, table = SimpleNamespace(shift=1, other=2), {"word": "a", "items": [1]}
    program = _program(settings, table)
    found = variables([functools.partial(program, 1.0)], ())
    values = {v.key: v.value for v in found}
    assert values.pop("settings") is settings and values.pop("table") is table
    assert values == {"_helper": _helper, "NUMBER": 1.0, "factor": 2.0, "shift": 1, "word": "a"}
    (shift,) = [v for v in found if v.key == "shift"]
    settings.shift = 5
    assert shift.table.get("shift", None) == 5 and "loc" not in values


class _Program:
    used, unused = 1.0, 2.0

    def __init__(self):
        self.width, self.steps = 3, 0

    def model(self, x):
        return self._scaled(x)

    def _scaled(self, x):
        return x * self.width * NUMBER

    __call__ = model


def test_methods_are_followed():
    program = _Program()
    for callables in ([program.model], [program]):
        assert {v.key: v.value for v in variables(callables, ())} == {"width": 3, "NUMBER": 1.0}


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.activation = _helper

    def forward(self, x):
        return self.activation(x) + loc


def test_modules_and_the_functions_that_they_hold():
    assert _found([], [_Net()]) == {("NUMBER", 1.0), ("loc", 3.0)}
    assert not variables([torch.tanh], [nn.Linear(1, 1)])

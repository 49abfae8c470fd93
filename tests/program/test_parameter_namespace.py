"""Modules with separate parameters, also inside other modules and after copies."""

import copy
import gc
import pickle

import pyro
import torch
from pyro.nn import PyroModule, PyroParam
from torch import nn
from torch.distributions import constraints

from pyro_bdl.program.parameter_namespace import OwnParameters


class Own(OwnParameters):
    def __init__(self, value):
        super().__init__()
        self.loc = nn.Parameter(torch.tensor(value))
        self.scale = PyroParam(torch.tensor(value), constraints.positive)

    def forward(self):
        return self.loc + self.scale


class Outer(OwnParameters):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.part = PyroModule[nn.Linear](1, 1)

    def forward(self):
        return self.inner() + self.part(torch.ones(1))


class Plain(PyroModule):
    def __init__(self, *parts):
        super().__init__()
        self.parts = PyroModule[nn.ModuleList](parts)

    def forward(self):
        return sum(part() for part in self.parts)


def _keys():
    return set(pyro.get_param_store().keys())


def _name(module):
    """The name before a parameter of a module that was called."""
    return pyro.get_param_store().param_name(module.loc).removesuffix(".loc")


def test_two_of_a_class_share_nothing():
    a, b = Own(1.0), Own(5.0)
    assert a() == 2.0
    assert b() == 10.0
    assert len(_keys()) == 4
    names = {pyro.get_param_store().param_name(p) for p in a.parameters()}
    assert names == {f"{_name(a)}.loc", f"{_name(a)}.scale"}


def test_the_name_is_kept_inside_other_modules():
    inner = Own(1.0)
    inner()
    name = _name(inner)
    outer = Outer(inner)
    outer()
    assert _name(inner) == name and {f"{name}.loc", f"{name}.scale"} < _keys()
    weight = pyro.get_param_store().param_name(outer.part.weight)
    assert weight.endswith(".part.weight") and not weight.startswith(name)
    both = Plain(Own(1.0), Own(2.0))
    assert both() == 6.0
    assert Plain(Own(3.0), Own(4.0))() == 14.0  # a second root of the same class


def test_copies_have_parameters_of_their_own():
    original = Outer(Own(1.0))
    original()
    clones = [copy.deepcopy(original), pickle.loads(pickle.dumps(original))]
    for clone in clones:
        with torch.no_grad():
            clone.inner.loc.fill_(100.0)
        before = _keys()
        difference = clone() - original()
        torch.testing.assert_close(difference, torch.tensor([99.0]))
        assert len(_keys() - before) == 4
        assert _name(clone.inner) != _name(original.inner)
        clone().backward()
    assert original.inner.loc.grad is None


def test_entries_leave_the_store_with_their_module():
    kept = Own(1.0)
    kept()
    before = _keys()
    gone = Outer(Own(1.0))
    gone()
    copy.deepcopy(gone)()
    assert len(_keys()) > len(before)
    del gone
    gc.collect()
    assert _keys() == before
    assert kept() == 2.0


def test_a_cleared_store_does_not_lose_values():
    module = Own(1.0)
    module()
    with torch.no_grad():
        module.loc.fill_(7.0)
        module.scale_unconstrained.fill_(0.0)
    pyro.clear_param_store()
    assert module() == 8.0
    assert pyro.get_param_store()[f"{_name(module)}.loc"] is module.loc


def test_a_name_depends_on_what_else_exists_alone():
    first, second = Own(1.0), Own(2.0)
    assert first() == 2.0 and second() == 4.0
    names = _name(first), _name(second)
    assert names[1] == f"{names[0]}_1"
    del first
    gc.collect()
    third = Own(3.0)
    assert third() == 6.0
    assert (_name(third), _name(second)) == names


def test_a_new_name_in_the_middle_of_a_call():
    class Late(Own):
        known = False

        def _name_of_kind(self):
            return "Known" if self.known else "Unknown"

        def forward(self):
            if not self.known:
                self.known = True
                self._rename()
            return super().forward()

    module, other = Late(1.0), Late(5.0)
    assert module() == 2.0 and other() == 10.0 and module() == 2.0
    assert {
        f"{name}.{part}" for name in ("Known", "Known_1") for part in ("loc", "scale")
    } == _keys()

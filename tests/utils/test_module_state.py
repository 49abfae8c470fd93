"""Modes and buffers are as they were, also after an error."""

import copy
import functools
import importlib
import pickle
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_bdl import bayesianize, handlers
from pyro_bdl.program import record
from pyro_bdl.program.program import trace_once
from pyro_bdl.utils.module_state import (
    Modules,
    evaluation_mode,
    hooked,
    preserved_buffers,
    vmappable,
)


def _net():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))


def _modes(net):
    return [part.training for part in net.modules()]


@pytest.mark.parametrize("error", [None, KeyError()])
def test_evaluation_mode_reaches_every_part_and_gives_it_back(error):
    net = _net()
    net[2].eval()
    before, x = _modes(net), torch.randn(4, 2)
    expected = _net().eval()
    expected.load_state_dict(net.state_dict())
    with suppress(KeyError), evaluation_mode(net):
        assert torch.equal(net(x), expected(x)) and _modes(net) == [False] * 5
        if error:
            raise error
    assert _modes(net) == before and torch.equal(net[1].running_mean, torch.zeros(3))


_GLOBAL = {"net": _net()}


class _OfClass:
    net = _net()

    def program(self, x):
        return self.net(x)


class _Slots:
    __slots__ = ("inner",)

    def __init__(self, net):
        self.inner = types.SimpleNamespace(parts={"net": net, **dict.fromkeys(range(2000))})

    def program(self, x):
        return self.inner.parts["net"](x)


class _Hidden(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.parts = (net,)

    def forward(self, x):
        return self.parts[0](x)


@functools.cache
def _cached():
    return _net()


def _in_other_file(tmp_path, monkeypatch):
    """A program whose network is in another file, in a folder named as this package."""
    folder = tmp_path / "pyro_bdl_experiments"
    folder.mkdir()
    (folder / "my_networks.py").write_text(
        "from torch import nn\n"
        "net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))"
    )
    monkeypatch.syspath_prepend(str(folder))
    other = importlib.import_module("my_networks")
    return lambda x: other.net(x), other.net


# A network, and how a program holds it.
_HOLDERS = {
    "itself": lambda net: net,
    "tuple": _Hidden,
    "closure": lambda net: lambda x: net(x),
    "inner function": lambda net: lambda x: next(net(x) for _ in range(1)),
    "partial": lambda net: functools.partial(lambda net, x: net(x), net),
    "slots": lambda net: _Slots(net).program,
    "pyro's handler": lambda net: poutine.scale(lambda x: net(x), 2.0),
    "own handler": lambda net: handlers.temper(lambda x: net(x), 2.0),
    "decorator": lambda net: torch.no_grad()(lambda x: net(x)),
    "compiled function": lambda net: torch.compile(lambda x: net(x), backend="eager"),
    "default": lambda net: lambda x, part=net: part(x),
    "parts alone": lambda net: lambda x: net[3](net[2](net[1](net[0](x)))),
}


@pytest.mark.parametrize("hold", _HOLDERS.values(), ids=_HOLDERS)
def test_a_run_shows_the_modules_that_a_program_calls(hold):
    net, x = _net(), torch.randn(4, 2)
    expected = _net().eval()
    expected.load_state_dict(net.state_dict())
    program = hold(net)
    with evaluation_mode(program) as modules:
        result = record(program, {}, (x,)).result
    assert torch.equal(result, expected(x))
    assert all(_modes(net)) and net[1].num_batches_tracked == 0
    assert all(part in modules for part in net[:])


def test_a_run_shows_modules_of_other_files_classes_and_caches(tmp_path, monkeypatch):
    x = torch.randn(4, 2)
    programs = [
        _in_other_file(tmp_path, monkeypatch),
        (lambda x: _GLOBAL["net"](x), _GLOBAL["net"]),
        (_OfClass().program, _OfClass.net),
        (lambda x: _cached()(x), _cached()),
    ]
    for program, net in programs:
        first = trace_once(program, (x,), {})
        assert list(first.modules) == list(net.modules())
        assert net[1].num_batches_tracked == 0
        with evaluation_mode(program):
            draws = [record(program, {}, (x,)).result for _ in range(2)]
        assert torch.equal(*draws) and all(_modes(net)) and net[1].num_batches_tracked == 0


def test_a_branch_of_a_later_run_is_met_there():
    body, heads, x = _net(), [_net(), _net()], torch.randn(4, 2)
    known = Modules()

    def program(x, task):
        return heads[task](x) + body(x)

    with evaluation_mode(known):
        for task in (0, 1):
            draws = [record(program, {}, (x, task)).result for _ in range(2)]
            assert torch.equal(*draws)
            assert heads[task] in known
    assert all(_modes(body) + _modes(heads[0]) + _modes(heads[1]))
    assert not any(net[1].num_batches_tracked for net in (body, *heads))


def test_contexts_inside_contexts_give_back_what_they_found():
    net, x, seen = _net(), torch.randn(4, 2), []

    def program(x):
        seen.append(_modes(net))
        return net(x)

    with evaluation_mode():
        with preserved_buffers(), evaluation_mode():
            record(program, {}, (x,))
        assert not any(_modes(net))  # as the outer context has it
        record(program, {}, (x,))
    assert all(seen[0]) and not any(seen[1]) and all(_modes(net))
    assert net[1].num_batches_tracked == 0


def test_nothing_is_searched_and_no_hook_stays():
    rows = [nn.Identity() for _ in range(3)]
    with evaluation_mode(lambda x: rows) as modules:
        record(lambda x: len(rows), {}, (torch.ones(2),))
        assert len(modules) == 0
        assert not torch.nn.modules.module._global_forward_pre_hooks
    with pytest.raises(KeyError), evaluation_mode(rows[0]):
        record(lambda: {}["key"], {})
    assert rows[0].training and not torch.nn.modules.module._global_forward_pre_hooks


def test_modules_are_told_apart_by_identity_and_can_be_copied():
    net = _net()
    modules = Modules(net, net[0], net.forward, "data", Modules(net))
    assert list(modules) == list(net.modules())
    copied, other = copy.deepcopy((modules, net))
    assert list(copied) == list(other.modules())
    assert len(pickle.loads(pickle.dumps(modules))) == 5


def test_hooks_see_the_first_call_of_a_module_that_is_met():
    net, calls = _net(), []

    def before(module, args):
        calls.append(("before", type(module).__name__))

    def after(module, args, output):
        calls.append(("after", type(module).__name__))

    for _ in range(2):
        with hooked(before, after, kind=nn.BatchNorm1d):
            for program in (net, net[1]):
                record(lambda x, program=program: program(x), {}, (torch.randn(4, 3)[:, :2],)
                    if program is net else (torch.randn(4, 3),))  # fmt: skip
    assert calls == [("before", "BatchNorm1d"), ("after", "BatchNorm1d")] * 4


@pytest.mark.parametrize("way", ["evaluation", "hooks"])
def test_networks_of_other_threads_are_left_alone(way):
    own, other = _net(), _net()
    calls = []
    context = (
        evaluation_mode(own)
        if way == "evaluation"
        else hooked(lambda module, args: calls.append(module), None, own)
    )

    def train():
        other(torch.randn(4, 2))
        return _modes(other), other[1].num_batches_tracked.item()

    def program():  # in whose run the hook is there
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(train).result()

    with context:
        modes, count = record(program, {}).result
    assert all(modes) and count == 1 and not calls


class _Tanh(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, x):
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_networks_run_as_they_are_written(in_place):
    calls = []

    def backend(graph, inputs):
        return lambda *args: calls.append(len(args)) or graph(*args)

    net = _Tanh()
    x = torch.randn(4, 2)
    expected = net(x)
    if in_place:
        net.compile(backend=backend)
    else:
        net = torch.compile(net, backend=backend)
    with evaluation_mode(net), preserved_buffers(net):
        assert torch.equal(net(x), expected)
        assert not calls
    assert net.training and torch.equal(net(x), expected)
    assert calls


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_networks_of_functions_run_as_they_are_written_once_they_were_met(in_place):
    calls = []

    def backend(graph, inputs):
        return lambda *args: calls.append(len(args)) or graph(*args)

    net, x = _Tanh(), torch.randn(4, 2)
    expected = net(x)
    if in_place:
        net.compile(backend=backend)
    else:
        net = torch.compile(net, backend=backend)

    def program(x):
        return net(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        modules = trace_once(program, (x,), {}).modules
        calls.clear()
        with evaluation_mode(modules):
            assert torch.equal(record(program, {}, (x,)).result, expected)
    assert not calls
    assert net.training and torch.equal(net(x), expected)
    assert calls


@pytest.mark.parametrize("error", [None, KeyError()])
def test_preserved_buffers(error):
    net, x = _net(), torch.randn(4, 2)
    net(x)
    before = {name: (id(value), value.clone()) for name, value in net.named_buffers()}
    with suppress(KeyError), preserved_buffers(net):
        net(x)
        assert not torch.equal(net[1].running_mean, before["1.running_mean"][1])
        if error:
            raise error
    for name, value in net.named_buffers():
        assert id(value) == before[name][0] and torch.equal(value, before[name][1])


def test_preserved_buffers_do_not_meet_draws():
    """Weights stand in the places of buffers during a call; inside vmap they are no tensors."""
    bnn = bayesianize(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))
    draws = {name: torch.randn(4, *bnn.get_buffer(f"network.{name}").shape) for name in bnn.sites}
    x = torch.randn(5, 2)
    before = {name: value.clone() for name, value in bnn.state_dict().items()}
    given = {name: value.clone() for name, value in draws.items()}
    with preserved_buffers(bnn):
        torch.vmap(lambda draw: record(bnn, draw, (x,)).result)(draws)
    assert all(torch.equal(bnn.state_dict()[name], value) for name, value in before.items())
    assert all(torch.equal(draws[name], value) for name, value in given.items())


def test_vmappable_restores_the_fast_path():
    before = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(KeyError), vmappable():
        assert not torch.backends.mha.get_fastpath_enabled()
        raise KeyError
    assert torch.backends.mha.get_fastpath_enabled() == before

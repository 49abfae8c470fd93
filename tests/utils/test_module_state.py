"""Modes and buffers are as they were, also after an error."""

import functools
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pyro
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_bdl import bayesianize, handlers
from pyro_bdl.program import record
from pyro_bdl.utils.module_state import (
    evaluation_mode,
    hooked,
    modules_of,
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


class _Holder:
    def __init__(self, net):
        self.parts = [{"net": net}]

    def program(self, x):
        return self.parts[0]["net"](x)


class _Hidden(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.parts = (net,)


def _of_global(x):
    return (lambda: _GLOBAL["net"](x))()


def _through_another(x):
    return _of_global(x)


@pytest.mark.parametrize(
    "hold",
    [
        lambda net: net,
        _Hidden,
        lambda net: lambda x: net(x),
        lambda net: [lambda x: [net for _ in x]],
        lambda net: functools.partial(lambda net, x: net(x), net),
        lambda net: _Holder(net).program,
        lambda net: poutine.scale(lambda x: net(x), 2.0),
        lambda net: handlers.temper(lambda x: net(x), 2.0),
        lambda net: torch.no_grad()(lambda x: net(x)),
        lambda net: torch.compile(lambda x: net(x), backend="eager"),
        lambda net: {"args": (1.0, net)},
        lambda net: lambda x, part=net: part(x),
    ],
)
def test_modules_are_found_wherever_a_program_holds_them(hold):
    net = _net()
    found = modules_of(hold(net))
    assert {id(part) for part in net.modules()} <= {id(part) for part in found}
    assert len(found) <= len(list(net.modules())) + 1


def test_modules_are_found_in_global_variables():
    for program in (_of_global, _through_another):
        assert modules_of(program) == list(_GLOBAL["net"].modules())


def test_data_and_libraries_are_not_searched():
    rows = [nn.Identity() for _ in range(2000)]
    assert modules_of(lambda x: (torch.nn.functional.relu(x), len(rows), pyro.sample)) == []


@pytest.mark.parametrize("way", ["evaluation", "hooks"])
def test_networks_of_other_threads_are_left_alone(way):
    own, other = _net(), _net()
    calls = []
    context = (
        evaluation_mode(own)
        if way == "evaluation"
        else hooked([own], lambda module, args: calls.append(module))
    )

    def train():
        other(torch.randn(4, 2))
        return _modes(other), other[1].num_batches_tracked.item()

    with context, ThreadPoolExecutor(1) as pool:
        modes, count = pool.submit(train).result()
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

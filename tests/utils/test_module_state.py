"""Modes and buffers are as they were, also after an error."""

import pytest
import torch
from torch import nn

from pyro_bdl import bayesianize
from pyro_bdl.program import record
from pyro_bdl.utils.module_state import evaluation_mode, preserved_buffers, vmappable


def _net():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))


def _modes(net):
    return [part.training for part in net.modules()]


@pytest.mark.parametrize("error", [False, True])
def test_evaluation_mode_reaches_every_part_and_gives_it_back(error):
    net = _net()
    net[2].eval()
    before = _modes(net)
    seen = []
    net[3].register_forward_pre_hook(lambda *_: seen.append(_modes(net)))
    x = torch.randn(4, 2)
    expected = _net().eval()
    expected.load_state_dict(net.state_dict())
    try:
        with evaluation_mode():
            assert torch.equal(net(x), expected(x))
            if error:
                raise KeyError
    except KeyError:
        pass
    assert seen == [[False] * 5]
    assert _modes(net) == before
    assert torch.equal(net[1].running_mean, torch.zeros(3))
    net(x)
    assert not torch.equal(net[1].running_mean, torch.zeros(3))  # the hook is gone


def test_evaluation_mode_nests_and_reaches_closures():
    net = _net()

    def program(x):
        return net(x)

    with evaluation_mode():
        with evaluation_mode():
            program(torch.randn(4, 2))
        assert not net.training
    assert all(_modes(net))


def test_a_part_called_before_its_whole_gets_its_own_mode_back():
    net = _net()
    with evaluation_mode():
        net[2](torch.ones(3))
        net(torch.randn(4, 2))
    assert _modes(net) == [True] * 5


@pytest.mark.parametrize("error", [False, True])
def test_preserved_buffers(error):
    net = _net()
    x = torch.randn(4, 2)
    net(x)
    before = {name: value.clone() for name, value in net.named_buffers()}
    identity = {name: id(value) for name, value in net.named_buffers()}
    try:
        with preserved_buffers():
            net(x)
            assert not torch.equal(net[1].running_mean, before["1.running_mean"])
            if error:
                raise KeyError
    except KeyError:
        pass
    for name, value in net.named_buffers():
        assert torch.equal(value, before[name])
        assert id(value) == identity[name]
    net(x)
    assert net[1].num_batches_tracked == 2


def test_preserved_buffers_do_not_meet_draws():
    """Weights stand in the places of buffers during a call; inside vmap they are no tensors."""
    bnn = bayesianize(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))
    draws = {name: torch.randn(4, *bnn.get_buffer(f"network.{name}").shape) for name in bnn.sites}
    x = torch.randn(5, 2)
    before = {name: value.clone() for name, value in bnn.state_dict().items()}
    given = {name: value.clone() for name, value in draws.items()}
    with preserved_buffers():
        torch.vmap(lambda draw: record(bnn, draw, (x,)).result)(draws)
    assert all(torch.equal(bnn.state_dict()[name], value) for name, value in before.items())
    assert all(torch.equal(draws[name], value) for name, value in given.items())


def test_vmappable_restores_the_fast_path():
    before = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(KeyError), vmappable():
        assert not torch.backends.mha.get_fastpath_enabled()
        raise KeyError
    assert torch.backends.mha.get_fastpath_enabled() == before

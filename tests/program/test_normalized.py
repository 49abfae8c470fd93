"""Weights whose size does not change the outputs, against runs with other sizes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from pyro_bdl.priors import normalized_layers

X = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Written(nn.Module):
    """A network whose forward pass is a function of itself and x."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def transformer():
    layer = nn.TransformerEncoderLayer(4, 2, 8, norm_first=True, batch_first=True)
    return nn.Sequential(nn.Linear(4, 4), nn.Unflatten(0, (1, 5)), layer, nn.LayerNorm(4))


def in_place(net, x):
    hidden = net.a(x)
    hidden += net.b(x)
    return net.c(F.layer_norm(F.relu(hidden, inplace=True), (4,), eps=1e-30))


def by_hand(net, x):
    """A normalization in torch's own operators, a concatenation, and a quotient."""
    hidden = torch.cat([net.a(x), net.b(x)], -1)
    hidden = hidden / hidden.square().mean(-1, keepdim=True).sqrt()
    return net.c(hidden[:, :4])


def rolled(net, x):
    """An operator that torch's functions do not show."""
    return net.c(F.layer_norm(Shifted.apply(net.a(x)), (4,)))


class Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def abc():
    return {name: nn.Linear(4, 4) for name in "abc"}


CASES = {
    "before": (lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 1)), {"0"}),
    "max pool": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 2), nn.MaxPool1d(2), nn.GroupNorm(1, 2)
        ),
        {"1"},
    ),
    "spectral_norm": (
        lambda: nn.Sequential(spectral_norm(nn.Linear(4, 3)), nn.Tanh()),
        {"0.parametrizations.weight"},
    ),
    "in place": (lambda: Written(in_place, **abc()), {"a + b"}),
    "by hand": (lambda: Written(by_hand, **abc()), {"a + b"}),
    "transformer": (transformer, {"0 + 2.self_attn.out_proj + 2.linear2"}),
    "keywords": (
        lambda: Written(
            lambda n, x: torch.div(input=n.a(x), other=torch.pow(n.a(x), exponent=2).mean().sqrt()),
            **abc(),
        ),
        {"a"},
    ),
    "rounded": (
        lambda: Written(
            lambda n, x: torch.div(n.a(x), n.a(x).abs().mean(), rounding_mode="floor").cos(),
            **abc(),
        ),
        set(),
    ),
    "torch's own order": (
        lambda: Written(
            lambda n, x: torch.batch_norm(
                n.a(x), n.b.bias, n.c.bias, None, None, True, 0.1, 1e-30, False
            ),
            **abc(),
        ),
        set(),
    ),
    "tied": (
        lambda: Written(
            lambda n, x: F.layer_norm(n.a(x), (4,)) + n.b(n.a(x)).tanh(),
            a=nn.Linear(4, 4),
            b=nn.Linear(4, 4),
        ),
        set(),
    ),
    "affine function": (
        lambda: Written(lambda n, x: n.c(F.layer_norm(1 + n.a(x), (4,))), **abc()),
        set(),
    ),
    "hidden operator": (lambda: Written(rolled, **abc()), set()),
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(3)


@pytest.mark.parametrize("case", CASES)
def test_sizes_that_are_free(case):
    make, expected = CASES[case]
    net = make().double()
    found = normalized_layers(net, X)
    assert set(found) == expected
    net.eval()
    for module in net.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-30
    before = net(X)
    for names in found.values():
        with torch.no_grad():
            for name in names:
                net.get_parameter(name).mul_(3.7)
        torch.testing.assert_close(net(X), before, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("function", [nn.Tanh(), nn.Hardtanh(), nn.Sigmoid(), nn.ReLU6()])
def test_a_saturated_layer_is_not_free(function):
    """Its size does not change the outputs here, and does so elsewhere."""
    net = nn.Sequential(nn.Linear(4, 3), function, nn.Linear(3, 2)).double()
    with torch.no_grad():
        net[0].weight.mul_(1e4)
    assert normalized_layers(net, X) == {}


def test_a_layer_that_is_zero_is_free_too():
    net = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)).double()
    nn.init.zeros_(net[0].weight)
    assert list(normalized_layers(net, X)) == ["0"]


def test_a_layer_that_is_not_called_is_no_group():
    net = Written(lambda net, x: net.a(x).tanh(), **abc()).double()
    assert normalized_layers(net, X) == {}

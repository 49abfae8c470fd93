"""Draws of large mean-field guides: the values and gradients of autograd, in less memory."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.nn import PyroModule, PyroParam
from pyro.optim import Adam
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.elbo import CompiledELBO, TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.guides import AutoMeanField, mean_field
from pyro_bdl.guides.large_draw import LargeDraw
from pyro_bdl.utils.memory import LiveMemory

D = torch.float64
X = torch.randn(6, 260, dtype=D, generator=torch.Generator().manual_seed(0))


def site(value, shape):
    return value.expand(shape).to_event(len(shape))


class Program(PyroModule):
    """Large sites with one prior, of learned location and width, and with other priors; small ones,
    one of them positive."""

    def __init__(self):
        super().__init__()
        self.center = nn.Parameter(torch.tensor(0.3, dtype=D))
        self.width = PyroParam(torch.tensor(0.7, dtype=D), dist.constraints.positive)

    def forward(self, x, y=None):
        one = torch.ones((), dtype=D)
        first = pyro.sample("first", site(dist.Normal(self.center, self.width), (260, 260)))
        bias = pyro.sample("bias", site(dist.Normal(0 * one, one), (260,)))
        last = pyro.sample("last", site(dist.Laplace(0 * one, one), (270, 260)))
        noise = pyro.sample("noise", dist.LogNormal(0 * one, one))
        mean = (x @ first + bias).tanh() @ last.T / 260**0.5
        return pyro.sample("y", dist.Normal(mean, noise).to_event(2), obs=y)


Y = torch.randn(6, 270, dtype=D, generator=torch.Generator().manual_seed(1))


def guide_of(program, **options):
    torch.manual_seed(1)
    guide = AutoMeanField(program, init_scale=0.2, **options).prototype(X, Y)
    with torch.no_grad():
        guide.scale_unconstrained.add_(torch.randn_like(guide.loc), alpha=0.3)
    return guide


def step(elbo, program, guide, times=1):
    """The last loss, and the gradients in all parameters."""
    pyro.set_rng_seed(2)
    for _ in range(times):
        parameters = [*guide.parameters(), *program.parameters()]
        for parameter in parameters:
            parameter.grad = None
        loss = elbo.differentiable_loss(program, guide, X, Y)
        loss.backward()
    return loss.detach(), [p.grad for p in parameters]


@pytest.mark.parametrize(
    ("elbo", "options"),
    [(TemperedTraceMeanField_ELBO, {}), (TemperedTrace_ELBO, {"train_loc": False})],
)
def test_steps_are_those_of_autograd(elbo, options, monkeypatch):
    """With the KL in closed form, the prior's parameters included, and with a sampled KL."""
    program = Program()
    guide = guide_of(program, **options)
    assert guide._is_large()
    found = step(elbo(0.7), program, guide)
    monkeypatch.setattr(mean_field, "LARGE", 10**9)
    assert not guide._is_large()
    torch.testing.assert_close(found, step(elbo(0.7), program, guide), rtol=1e-9, atol=1e-9)


def test_graphs_take_the_same_steps():
    program = Program()
    guide = guide_of(program)
    elbo = CompiledELBO()
    found = step(elbo, program, guide, times=4)
    assert elbo.num_replays == 2
    expected = step(TemperedTraceMeanField_ELBO(), program, guide, times=4)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_two_backward_passes_add_up():
    program = Program()
    guide = guide_of(program)
    loss = TemperedTraceMeanField_ELBO().differentiable_loss(program, guide, X, Y)
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in guide.parameters()]
    loss.backward()
    torch.testing.assert_close([p.grad for p in guide.parameters()], [2 * g for g in once])


def test_svi_trains_all_parameters():
    program = Program()
    guide = guide_of(program)
    before = [p.detach().clone() for p in guide.parameters()]
    SVI(program, guide, Adam({"lr": 0.1}), TemperedTraceMeanField_ELBO()).step(X, Y)
    for old, new in zip(before, guide.parameters(), strict=True):
        assert (old - new).abs().min() > 0.09


@pytest.mark.parametrize("center", [0.0, 2.0])
def test_the_kl_of_many_weights_near_the_prior_does_not_cancel(center):
    """The KL of 10^6 weights with q = Normal(n, (1 + 1e-4)^2 t^2) is 0.01 nats, in float32 too."""
    size, t = 1_000_000, torch.tensor(0.3)
    wide = dist.Normal(torch.tensor(center), t).expand([size]).to_event(1)
    guide = AutoMeanField(lambda: pyro.sample("w", wide), init_scale=0.3 * (1 + 1e-4)).prototype()
    loc = torch.full((size,), center)
    draw = LargeDraw(guide.layout, loc, guide.scale_unconstrained, torch.zeros(size))
    r = (draw.scales["w"].double() / t.double()).square()
    exact = 0.5 * (r - 1 - r.log()).sum().item()
    assert exact == pytest.approx(0.01, rel=0.05)
    assert draw.kl("w", torch.tensor(center), t).item() == pytest.approx(exact, rel=0.01)


def test_a_step_holds_no_more_vectors_than_it_needs():
    """Noise, draw, scales and the gradients of network, location and scale, and nothing after."""
    net = nn.Sequential(nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 400))
    model = bdl.models.Regression(bdl.bayesianize(net), noise=0.3, num_data=4)
    x = torch.randn(4, 400)
    guide = AutoMeanField(model).prototype(x, x)
    elbo = TemperedTraceMeanField_ELBO()
    elbo.differentiable_loss(model, guide, x, x).backward()
    guide.zero_grad()
    with LiveMemory() as live:
        elbo.differentiable_loss(model, guide, x, x).backward()
    vector = 4 * len(guide.loc)
    assert live.peak < 7.2 * vector  # with the two parameters and scratch memory
    assert live.now < 4.1 * vector  # parameters and gradients

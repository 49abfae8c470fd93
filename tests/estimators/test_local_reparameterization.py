"""Local reparameterization: a network's outputs, positions and gradients."""

from functools import partial

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from helpers import second_device

from pyro_bdl import handlers
from pyro_bdl.estimators import local_reparameterization

D = torch.float64


def network(x, w, b, v):
    return F.linear(torch.tanh(F.linear(x, w, b)), v)


def test_a_networks_outputs_have_the_moments_of_plain_draws(layer):
    """Mean, variance and third moment of two outputs, within five standard errors."""
    made = layer(network, torch.tensor([0.7, -1.2], dtype=D), w=(3, 2), b=3, v=(2, 3))
    count = 100_000
    (rows,), plain = made.runs(local_reparameterization(), 1, count), made.plain(count)
    mean = plain.mean(0)
    for moment in (
        lambda z: z,
        lambda z: (z - mean).square(),
        lambda z: (z - mean).pow(3),
        lambda z: (z - mean).prod(-1, keepdim=True),
    ):
        a, b = moment(rows), moment(plain)
        error = ((a.var(0) + b.var(0)) / count).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() < 5 * error).all()


def test_independent_positions_keep_marginals_alone(layer):
    """As usual for convolutions (Molchanov, Ashukha & Vetrov 2017)."""
    x = torch.randn(2, 7, dtype=D)
    made = layer(lambda x, w, b: F.conv1d(x, w, b), x, w=(3, 2, 3), b=3)
    (rows,) = made.runs(local_reparameterization(positions="independent"), 1, 20_000)
    mean, covariance = made.moments()
    variance = covariance.diagonal()
    rows = rows.flatten(1)
    assert ((rows.mean(0) - mean).abs() < 5 * (variance / 20_000).sqrt()).all()
    assert ((rows.var(0) / variance - 1).abs() < 5 * (2 / 20_000) ** 0.5).all()
    correlation = rows.T.corrcoef() - torch.eye(len(variance), dtype=D)
    assert (correlation.abs() < 5 / 20_000**0.5).all()


def test_inputs_of_zeros_have_gradients(layer):
    dtype = torch.float32
    loc = torch.ones(3, 2, dtype=dtype, requires_grad=True)
    scale = torch.full((3, 2), 0.3, dtype=dtype, requires_grad=True)
    made = layer(lambda x, w: F.linear(x, w), torch.zeros(2, dtype=dtype), w=(3, 2))
    made.q["w"] = dist.Normal(loc, scale)
    (rows,) = made.runs(local_reparameterization(), 1, 3)
    assert (rows.abs() < 1e-15).all()
    for gradient in torch.autograd.grad(rows.sum(), [loc, scale]):
        assert torch.equal(gradient, torch.zeros(3, 2, dtype=dtype))


def test_gradients_are_those_of_the_formula(layer):
    """dz/dm and dz/ds of z = m x + sqrt(s^2 x^2) eps, with the noise computed from z. Source:
    Kingma, Salimans & Welling 2015, equation 6."""
    x = torch.tensor([1.5, -0.5], dtype=D)
    loc = torch.tensor([[0.3, 0.8]], dtype=D, requires_grad=True)
    scale = torch.tensor([[0.4, 0.9]], dtype=D, requires_grad=True)
    made = layer(lambda x, w: F.linear(x, w), x, w=(1, 2))
    made.q["w"] = dist.Normal(loc, scale)
    ((z,),) = made.runs(local_reparameterization(), 1, 1)
    deviation = (scale * x).square().sum().sqrt()
    noise = ((z - loc @ x) / deviation).detach()
    in_loc, in_scale = torch.autograd.grad(z.sum(), [loc, scale])
    torch.testing.assert_close(in_loc[0], x)
    torch.testing.assert_close(in_scale[0], (noise * scale * x.square() / deviation)[0].detach())


def test_bad_positions():
    with pytest.raises(ValueError, match="positions must be one of 'joint'"):
        handlers.local_reparameterization(positions="all")


@pytest.mark.parametrize("estimator", [handlers.local_reparameterization, handlers.flipout])
def test_on_another_device(layer, estimator, device):
    moved = partial(second_device.moved, device=device)
    made = layer(network, moved(torch.tensor([0.7, -1.2], dtype=D)), w=(3, 2), b=3, v=(2, 3))
    made.q = {n: dist.Normal(moved(q.loc), moved(q.scale)) for n, q in made.q.items()}
    rows, plain = made.runs(estimator(), 10_000)[:, 0], made.plain(10_000)
    assert rows.device.type == device.type
    error = ((rows.var(0) + plain.var(0)) / 10_000).sqrt()
    assert ((rows.mean(0) - plain.mean(0)).abs() < 5 * error).all()

"""The public JAX density against torch, with its own data and with others."""

import jax
import jax.numpy as jnp
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.errors import UnsupportedProgramError


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = torch.randn(8, 2, dtype=torch.float64)
    model = bdl.models.Regression(bdl.bayesianize(net, bdl.priors.Normal(1.0)), num_data=8)
    return model, x, x[:, 0].sin()


def test_value_gradient_and_constrained_latents_are_those_of_torch():
    model, x, y = network()
    program = bdl.Program(model, x, y)
    density = program.to_jax()
    u = torch.randn(program.size, dtype=torch.float64, requires_grad=True)
    expected = program.log_density(u)
    (slope,) = torch.autograd.grad(expected, u)
    value, gradient = density.value_and_grad(u.detach().numpy())
    assert np.allclose(value, expected.item(), rtol=1e-12)
    assert np.allclose(gradient, slope, atol=1e-10)
    there = density.constrain(density.initial)
    for site, latent in program.initial.items():
        assert np.allclose(there[site], latent, atol=1e-12)


def test_minibatches_are_arguments_that_are_traced_once():
    model, x, y = network()
    program = bdl.Program(model, x, y)
    density = program.to_jax()
    u, runs = density.initial, []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    both = jax.jit(density.value_and_grad)
    both(u, x[:3].numpy(), y[:3].numpy())
    traced = len(runs)
    for rows in ([0, 1, 2], [5, 6, 7]):
        runs.clear()
        value, _ = both(u, x[rows].numpy(), y[rows].numpy())
        assert traced and not runs
        expected = program.log_density(torch.from_numpy(u), x[rows], y[rows])  # scaled by 8/3
        assert np.allclose(value, expected.item(), rtol=1e-10)
    more = density(u, x.repeat(2, 1)[:10][:7].numpy(), y=y[:7].numpy())
    assert np.allclose(more, program.log_density(torch.from_numpy(u), x[:7], y=y[:7]).item())
    mapped = jax.vmap(density, (None, 0, 0))(u, x.reshape(2, 4, 2).numpy(), y.reshape(2, 4).numpy())
    assert np.allclose(mapped.mean(), _prior_and_mean(program, u, x, y))


def _prior_and_mean(program, u, x, y):
    halves = [program.log_density(torch.from_numpy(u), x[i : i + 4], y[i : i + 4]) for i in (0, 4)]
    return float(sum(halves)) / 2


def test_draws_of_another_sampler_come_in_as_samples():
    def positive(y):
        rate = pyro.sample("rate", dist.Gamma(torch.tensor(2.0, dtype=torch.float64), 1.0))
        pyro.sample("y", dist.Poisson(rate), obs=y)

    density = bdl.Program(positive, torch.tensor(3.0, dtype=torch.float64)).to_jax()
    vectors = jnp.linspace(-1, 1, 12).reshape(2, 6, 1)
    samples = density.samples(vectors, {"energy": jnp.zeros((2, 6))})
    assert np.allclose(samples.latents["rate"], np.exp(vectors[..., 0]))
    assert samples.stats["energy"].shape == (2, 6)
    with pytest.raises(ValueError, match=r"shape \(chains, draws, 1\)"):
        density.samples(jnp.zeros((2, 3)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused(dtype):
    x = torch.randn(4, 2, dtype=dtype)
    model = bdl.models.Regression(bdl.bayesianize(nn.Linear(2, 1, dtype=dtype)), noise=0.5)
    with pytest.raises(UnsupportedProgramError, match=f"latents are {dtype}"):
        bdl.Program(model, x, x[:, 0]).to_jax()


def test_data_of_another_dtype_are_refused():
    model, x, y = network()
    density = bdl.Program(model, x, y).to_jax()
    with pytest.raises(TypeError, match="float64"):
        density(density.initial, x.float().numpy(), y.float().numpy())

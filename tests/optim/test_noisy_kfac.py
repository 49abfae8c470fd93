"""Noisy K-FAC against posteriors that are matrix normals."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.conjugate import Conjugate
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.guides import AutoMatrixNormal, AutoMeanField
from pyro_bdl.optim import InSVI, KroneckerGaussNewton_ELBO, NoisyKFAC

N, INPUTS, OUTPUTS, NOISE = 30, 3, 2, 0.5


def data():
    torch.manual_seed(0)
    mix = torch.tensor([[1.0, 0.6, 0.0], [0.0, 1.0, -0.5], [0.0, 0.0, 0.7]], dtype=torch.float64)
    x = torch.randn(N, INPUTS, dtype=torch.float64) @ mix
    return x, x @ torch.randn(INPUTS, OUTPUTS, dtype=torch.float64)


def program(outputs_first=True):
    shape = (OUTPUTS, INPUTS) if outputs_first else (INPUTS, OUTPUTS)

    def model(x, y=None):
        zero = torch.zeros(shape, dtype=torch.float64)
        w = pyro.sample("w", dist.Normal(zero, 1.0).to_event(2))
        f = nn.functional.linear(x, w) if outputs_first else x @ w
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(f, NOISE).to_event(1), obs=y)

    return model


def trained(model, x, y, temperature=1.0, steps=140, **options):
    torch.manual_seed(1)
    guide = AutoMatrixNormal(model).prototype(x, y)
    optimizer = NoisyKFAC(guide, lr=0.2, betas=(0.9, 0.8))
    loss = KroneckerGaussNewton_ELBO(temperature, **options)(model, guide)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        step = loss.take_step(x, y)
        step.backward()
        optimizer.step(step)
        schedule.step()
    return guide


@pytest.mark.parametrize(("first", "eta"), [(True, 1.0), (False, 0.2)])
def test_the_posterior_of_a_linear_regression(first, eta):
    """It is MN(M, I, P^-1) with P = x' x / (eta sigma^2) + I: exactly Kronecker-factored."""
    x, y = data()
    guide = trained(program(first), x, y, eta, curvature="ggn")
    exact = Conjugate(x, y, NOISE, eta=eta)
    covariance, mean = exact.covariance.contiguous(), exact.mean.mT
    rows, columns = (f @ f.mT for f in guide.factors("w"))
    identity = torch.eye(OUTPUTS, dtype=x.dtype)
    expected = torch.kron(identity, covariance) if first else torch.kron(covariance, identity)
    found = torch.kron(rows, columns).detach()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * expected.max().item())
    mean = mean if first else mean.mT
    sd = expected.diagonal().sqrt().reshape(mean.shape)
    assert ((guide.site_distributions()["w"].mean - mean).abs() < 0.6 * sd).all()


def test_the_step_is_the_fraction_toward_the_stationary_precision():
    """U^-1 <- (1 - rho) U^-1 + rho [tr(A V) G + tr(V) I] / q for a standard Normal prior."""
    x, y = data()
    model = program()
    guide = AutoMatrixNormal(model, init_scale=0.3).prototype(x, y)
    before = [f.detach().clone() for f in guide.factors("w")]
    optimizer = NoisyKFAC(guide, betas=(0.0, 0.9))
    loss = KroneckerGaussNewton_ELBO(curvature="ggn")(model, guide)
    step = loss.take_step(x, y)
    step.backward()
    optimizer.step(step)
    u, v = (f @ f.mT for f in before)
    inputs, outputs = x.mT @ x, torch.eye(OUTPUTS, dtype=x.dtype) / NOISE**2
    eye_u, eye_v = (torch.eye(n, dtype=x.dtype) for n in (OUTPUTS, INPUTS))
    row = (torch.trace(inputs @ v) * outputs + torch.trace(v) * eye_u) / INPUTS
    column = (torch.trace(outputs @ u) * inputs + torch.trace(u) * eye_v) / OUTPUTS
    for factor, old, target in zip(guide.factors("w"), (u, v), (row, column), strict=True):
        precision = 0.9 * torch.linalg.inv(old) + 0.1 * target
        torch.testing.assert_close((factor @ factor.mT).detach(), torch.linalg.inv(precision))


def test_a_network_in_pyros_svi():
    x, y = data()
    net = nn.Sequential(nn.Linear(INPUTS, 4), nn.Tanh(), nn.Linear(4, OUTPUTS)).double()
    model = bdl.models.Regression(bdl.bayesianize(net), noise=0.5, num_data=N)
    guide = AutoMatrixNormal(model, max_side=3).prototype(x, y)
    assert any(f.dim() == 1 for name in guide.matrices for f in guide.factors(name))
    svi = InSVI(model, guide, NoisyKFAC(guide), KroneckerGaussNewton_ELBO())
    losses = [svi.step(x, y) for _ in range(24)]
    assert sum(losses[-5:]) < sum(losses[:5])


def test_what_is_refused():
    x, y = data()
    model = program()
    other = AutoMeanField(model).prototype(x, y)
    with pytest.raises(TypeError, match="moves the factors of an AutoMatrixNormal"):
        NoisyKFAC(other)
    with pytest.raises(TypeError, match="KroneckerGaussNewton_ELBO is for an AutoMatrixNormal"):
        KroneckerGaussNewton_ELBO()(model, other)(x, y)

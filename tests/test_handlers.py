"""The densities of tempered and cold programs."""

import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_bdl import Program, bayesianize, models
from pyro_bdl.handlers import cold, temper

X = torch.linspace(-1, 1, 6, dtype=torch.float64)
Y = torch.sin(3 * X)


def program(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=x.dtype), 1.0).to_event(1))
    f = pyro.deterministic("f", w[0] + w[1] * x)
    pyro.factor("extra", -w.abs().sum())
    with pyro.plate("data", 12, subsample=torch.arange(len(x))):
        with poutine.scale(scale=0.5), poutine.mask(mask=x > -0.9):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)
        z = pyro.sample("z", dist.Normal(0.0 * x, 1.0))
        pyro.sample("v", dist.Normal(z, 0.5), obs=y)


@pytest.mark.parametrize("eta", [0.1, 1.0, 3.0])
def test_temper_divides_the_likelihood_alone(eta):
    """p(y | w)^(1/eta) p(w) (Huix et al. 2022)."""
    plain, tempered = Program(program, X, Y), Program(temper(program, eta), X, Y)
    latents = plain.initial
    run = plain.run(latents)
    torch.testing.assert_close(tempered.log_prior(latents), plain.log_prior(latents))
    expected = run.log_prior() + run.log_likelihood() / eta
    torch.testing.assert_close(tempered.log_joint(latents), expected)
    torch.testing.assert_close(tempered.log_likelihood(latents), plain.log_likelihood(latents))
    trace = poutine.trace(poutine.condition(temper(program, eta), latents)).get_trace(X, Y)
    torch.testing.assert_close(trace.log_prob_sum(), expected)
    twice = Program(temper(temper(program, 0.5), 2.0 * eta), X, Y)
    torch.testing.assert_close(twice.log_joint(latents), expected)
    assert torch.equal(tempered.run(latents).deterministic["f"], run.deterministic["f"])


@pytest.mark.parametrize("t", [0.1, 1.0, 3.0])
def test_cold_divides_all(t):
    """(p(y | w) p(w))^(1/T) (Wenzel et al. 2020, equation 2)."""
    plain, colder = Program(program, X, Y), Program(cold(program, t), X, Y)
    latents = plain.initial
    torch.testing.assert_close(colder.log_joint(latents), plain.log_joint(latents) / t)


def test_the_program_is_not_changed_and_its_parameters_are_seen():
    model = models.Regression(bayesianize(nn.Linear(1, 1).double()), noise=0.5)
    x, y = X[:, None], Y
    before = Program(model, x, y)
    value = before.log_joint(before.initial)
    tempered = temper(model, 0.1)
    Program(tempered, x, y).log_joint(before.initial)
    assert torch.equal(before.log_joint(before.initial), value)
    assert {id(m) for m in tempered.modules()} > {id(m) for m in model.modules()}
    tempered.eval()
    assert not model.training
    again = Program(pickle.loads(pickle.dumps(tempered)), x, y)
    torch.testing.assert_close(
        again.log_joint(before.initial), Program(tempered, x, y).log_joint(before.initial)
    )


@pytest.mark.parametrize("handler", [temper, cold])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_bad_temperatures(handler, bad):
    with pytest.raises(ValueError, match="temperature must be positive and finite"):
        handler(program, bad)

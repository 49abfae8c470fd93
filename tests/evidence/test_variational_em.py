"""Variational EM: exact where the guide's posterior is."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal
from torch import nn
from torch.distributions import constraints

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.curvature.hyperparameters import read_at_center
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.evidence import variational_em
from pyro_bdl.guides import AutoMeanField


class FullRank(AutoMeanField):
    """A Normal with any covariance, for the M-step."""

    factor = None

    def sample_vectors(self, num_samples):
        noise = torch.randn(num_samples, len(self.loc))
        return self.loc + noise @ self.factor.mT

    def variances(self):
        return (self.factor @ self.factor.mT).diagonal()


class ExactPosterior:
    """A bound in whose place a guide is put to the exact posterior of the hyperparameters."""

    def __init__(self, line):
        self.line = line

    def differentiable_loss(self, model, guide, *data):
        line = self.line
        with torch.no_grad():
            now = {
                name.rpartition(".")[2]: p.value
                for name, p in read_at_center(model, guide).parameters.items()
            }
            a, s = now["hyper_prior_scale"], now["noise"]
            guide.loc.copy_(line.mode(a, s))
            covariance = torch.linalg.inv(line.precision(a, s))
            if isinstance(guide, FullRank):
                guide.__dict__["factor"] = torch.linalg.cholesky(covariance)
            else:
                guide.scale = covariance.diagonal().sqrt()
        return 0.0 * sum(parameter.sum() for parameter in guide.parameters())


def exact_em(line, guide, data, rounds):
    return variational_em(
        line.model, guide, data, rounds=rounds, steps=1, elbo=ExactPosterior(line)
    )


def orthogonal(line):
    """The same, with a design whose columns are orthogonal: the posterior is mean-field."""
    columns = torch.linalg.qr(torch.cat([torch.ones(12, 1), line.x], 1))[0]
    line.x = columns[:, 1:] * 3.0
    line.design = torch.cat([line.x, torch.ones(12, 1)], 1)
    return line


def exact_steps(line, rounds):
    """a^2 = mean E[w^2], s^2 = mean E[(y - f)^2], each under the posterior before."""
    a, s, found = torch.tensor(line.prior), torch.tensor(line.noise), []
    for _ in range(rounds):
        mean, covariance = line.mode(a, s), torch.linalg.inv(line.precision(a, s))
        a = ((mean.square() + covariance.diagonal()).mean()).sqrt()
        rest = (line.y - line.design @ mean).square().sum()
        spread = torch.einsum("np,pq,nq->", line.design, covariance, line.design)
        s = ((rest + spread) / len(line.y)).sqrt()
        found.append((a, s))
    return found


def short(history):
    return [tuple(round_.values()) for round_ in history]


@pytest.mark.parametrize("batches", [1, 3])
def test_the_exact_posterior_gives_exact_em(line, exact_expectations, batches):
    """theta^2 = E[w^2], noise^2 = E[(y - f)^2] (Dempster, Laird & Rubin 1977; Bishop 2006, section
    9.3.4)."""
    exact_expectations(4)
    size = 12 // batches
    data = [(line.x[i : i + size], line.y[i : i + size]) for i in range(0, 12, size)]
    history = exact_em(line, FullRank(line.model), data, rounds=4)
    torch.testing.assert_close(short(history), exact_steps(line, 4), rtol=1e-9, atol=1e-9)


def test_mean_field_is_exact_on_an_orthogonal_design(line, exact_expectations):
    line = orthogonal(line)
    exact_expectations(4)
    history = exact_em(line, AutoMeanField(line.model), line.data, rounds=4)
    torch.testing.assert_close(short(history), exact_steps(line, 4), rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("error:variational_em takes the steps in torch")
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_with_a_trained_e_step(line, exact_expectations, backend):
    """Adam finds the mean-field posterior; expectations are exact, so that no noise is left."""
    line = orthogonal(line)
    draws = exact_expectations(4)
    guide = AutoMeanField(line.model, init_scale=0.2)
    elbo = TemperedTraceMeanField_ELBO(num_particles=draws)
    history = variational_em(
        line.model, guide, line.data, rounds=2, steps=250, learning_rate=0.05, elbo=elbo,
        backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(short(history), exact_steps(line, 2), rtol=0.02, atol=0.0)
    assert all(parameter.grad is None for parameter in guide.parameters())


def test_weights_without_a_prior_take_gradient_steps(line):
    torch.manual_seed(0)
    prior = priors.ByName({"weight": priors.Normal(line.bnn.prior.scale)})
    model = models.Regression(bayesianize(nn.Linear(3, 1), prior), noise=0.5)
    bias = dict(model.named_parameters())["network.network.bias"]
    before = bias.detach().clone()
    history = variational_em(model, AutoMeanField(model), line.data, rounds=2, steps=3, m_steps=4)
    assert not torch.equal(bias, before) and bias.grad is None
    assert [len(found) for found in history] == [2, 2]


@pytest.mark.parametrize(
    ("guide", "elbo"),
    [
        (AutoMeanField, TemperedTraceMeanField_ELBO(num_particles=40)),
        (AutoDiagonalNormal, Trace_ELBO(num_particles=40, vectorize_particles=True)),
    ],
)
def test_a_parameter_without_a_closed_form(guide, elbo):
    """s^2 = mean y^2 - 1/4 for y_n ~ Normal(s w_n, 1/4), w_n ~ Normal(0, 1), whose guide is exact.

    The last rounds' mean is within 6 %: the noise of 40 draws moves each by about 3 %.
    """
    y = torch.tensor([0.3, -0.4, 1.9, 0.8, -0.1])

    def model(y):
        s = pyro.param("s", torch.tensor(0.7), constraint=constraints.positive)
        with pyro.plate("n", len(y)):
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(s * w, 0.5), obs=y)

    pyro.clear_param_store()
    torch.manual_seed(0)
    history = variational_em(
        model, guide(model), (y,), rounds=8, steps=30, m_steps=10, learning_rate=0.05, elbo=elbo
    )
    mean = torch.stack([found["s"] for found in history[-3:]]).mean()
    torch.testing.assert_close(mean, (y.square().mean() - 0.25).sqrt(), rtol=0.06, atol=0.0)


def test_one_number_for_each_weight(line, learn, exact_expectations):
    """theta_i^2 = E[w_i^2] for a scale of the weights' own shape."""
    rules = {"weight": priors.Normal(learn([0.4, 0.9, 1.5])), "bias": priors.Normal(0.6)}
    model = models.Regression(bayesianize(nn.Linear(3, 1), priors.ByName(rules)), noise=0.5)
    guide = AutoMeanField(model).prototype(*line.data)
    (found,) = variational_em(model, guide, line.data, rounds=1, steps=0)
    (value,) = found.values()
    expected = (guide.loc.square() + guide.scale.square())[:3].sqrt()
    torch.testing.assert_close(value, expected.detach())


@pytest.mark.parametrize("power", [1, 2])
def test_a_scale_that_two_statements_read(power):
    """s^2 is the mean of E[w^2] over both sites; for the scales s and s^2, by Adam,
    2 E[w^2] / s^2 + 2 * 2 E[v^2] / s^4 = 2 + 2 * 2 for two numbers each."""
    x, y = torch.randn(9, 4), torch.randn(9)

    def read():
        return pyro.param("s", lambda: torch.tensor(0.7), constraint=constraints.positive)

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), read()).to_event(1))
        v = pyro.sample("v", dist.Normal(torch.zeros(2), read() ** power).to_event(1))
        with pyro.plate("n", len(y)):
            pyro.sample("y", dist.Normal(x[:, :2] @ w + x[:, 2:] @ v, 0.5), obs=y)

    pyro.clear_param_store()
    guide = AutoMeanField(model).prototype(x, y)
    with torch.no_grad():
        guide.loc.copy_(torch.tensor([1.0, -0.5, 0.6, 0.2]))
    (found,) = variational_em(
        model, guide, (x, y), rounds=1, steps=0, m_steps=300, learning_rate=0.05
    )
    first, second = (guide.loc.square() + guide.scale.square()).detach().split(2)
    slope = first.sum() / found["s"] ** 2 + power * second.sum() / found["s"] ** (2 * power)
    torch.testing.assert_close(slope, torch.tensor(2.0 + 2.0 * power), rtol=1e-2, atol=0.0)


def test_nothing_to_maximize(line, learn):
    model = models.Regression(bayesianize(nn.Linear(3, 1)), noise=0.5)
    with pytest.raises(ValueError, match="the program has no parameter of its own"):
        variational_em(model, AutoMeanField(model), line.data, rounds=1, steps=1)

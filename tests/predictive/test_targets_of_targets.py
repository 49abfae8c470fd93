"""Observed sites that depend on one another: y_t ~ N(w x + r y_(t-1), 1), given x alone."""

import functools

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl.errors import UnsupportedProgramError

pytestmark = [
    pytest.mark.usefixtures("double"),
    pytest.mark.filterwarnings("ignore:.*#not-at-a-maximum"),
]
R = 1.5


def chain(x, y=None, *, coupled=True):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    mean = w * x
    with pyro.plate("data", len(x)):
        for t in range(3):
            value = pyro.sample(f"y{t}", dist.Normal(mean, 1.0), obs=None if y is None else y[:, t])
            mean = w * x + (R * value if coupled else 0.0)
        return value


def exact(x, w=2.0):
    mean, variance = torch.zeros_like(x), torch.zeros_like(x)
    for t in range(3):
        mean, variance = w * x + R * mean, 1.0 + R**2 * variance
        yield f"y{t}", mean, variance


def test_moments_without_targets_are_over_them_too():
    """At one w: E y_t = w x + r E y_(t-1), Var y_t = 1 + r^2 Var y_(t-1)."""
    x, count = torch.tensor([-1.0, 0.3]), 20000
    samples = bdl.Samples({"w": torch.full((1, count), 2.0)})
    samples = samples.of_program(bdl.Program(chain, x, torch.zeros(2, 3)))
    predictive = bdl.Predictive(chain, samples)
    found, means = predictive.moments(x), predictive.mean(x)
    for name, mean, variance in exact(x):
        error = 5.0 * (variance.max() / count) ** 0.5
        for estimate in (found[name].mean, means[name].mean(0)):
            torch.testing.assert_close(estimate, mean, rtol=0.0, atol=float(error))
        torch.testing.assert_close(found[name].variance, variance, rtol=0.05, atol=0.0)


def test_given_targets_are_used():
    x, y = torch.tensor([-1.0, 0.3]), torch.tensor([[1.0, 2.0, 0.0], [0.0, -1.0, 0.0]])
    found = bdl.Predictive(chain, bdl.Samples({"w": torch.full((1, 2), 2.0)})).moments(x, y)
    for t in range(3):
        mean = 2.0 * x + (R * y[:, t - 1] if t else 0.0)
        torch.testing.assert_close(found[f"y{t}"].mean, mean)
        torch.testing.assert_close(found[f"y{t}"].variance, torch.ones(2))


def test_the_linearized_model_needs_the_targets():
    x, y = torch.tensor([-1.0, 0.3]), torch.randn(2, 3)
    posterior = bdl.guides.AutoLaplaceGGN(chain, structure="full").laplace_approximation((x, y))
    predictive = bdl.LinearizedPredictive(chain, posterior)
    calls = (
        predictive.moments,
        predictive,
        functools.partial(bdl.freeze, chain, posterior, site="y2"),
    )
    for call in calls:
        with pytest.raises(UnsupportedProgramError, match=r"'y[12]' depends on the value of the"):
            call(x)
    found, variance = predictive.moments(x, y), posterior.variances()
    for t in range(3):
        torch.testing.assert_close(found[f"y{t}"].variance, 1.0 + x.square() * variance)


def test_sites_that_only_follow_one_another_are_as_before():
    model = functools.partial(chain, coupled=False)
    x, y = torch.tensor([-1.0, 0.3]), torch.randn(2, 3)
    posterior = bdl.guides.AutoLaplaceGGN(model, structure="full").laplace_approximation((x, y))
    found = bdl.LinearizedPredictive(model, posterior).moments(x)
    for t in range(3):
        expected = 1.0 + x.square() * posterior.variances()
        torch.testing.assert_close(found[f"y{t}"].variance, expected)


def test_rows_of_one_event_have_one_joint_density():
    """log N(y; f, C + 1) with the covariances C between the rows."""

    def event(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        return pyro.sample("y", dist.Normal(w * x, 1.0).to_event(1), obs=y)

    x = torch.linspace(-1.0, 1.0, 6)
    y = 0.5 * x
    posterior = bdl.guides.AutoLaplaceGGN(event, structure="full").laplace_approximation((x, y))
    predictive = bdl.LinearizedPredictive(event, posterior, num_samples=20000, seed=0)
    mean, covariance = predictive.joint_parameter_covariance(x)["y"]
    expected = dist.MultivariateNormal(mean, covariance + torch.eye(6)).log_prob(y)
    torch.testing.assert_close(predictive.log_density(x, y)["y"], expected, rtol=0.0, atol=0.02)
    with pytest.raises(UnsupportedProgramError, match="rows of the site 'y' are one event"):
        posterior.fit_width((x, y))

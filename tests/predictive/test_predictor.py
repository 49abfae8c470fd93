"""Sampled and linearized predictions mean the same by the same names."""

import functools
from contextlib import nullcontext

import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning
from pyro_bdl.predictive.predictor import predictor

pytestmark = pytest.mark.usefixtures("double")
X = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
Z = torch.tensor([[-2.0], [0.5], [1.5]]).double()
LINE = X[:, 0] + 0.3 * torch.sin(9 * X[:, 0])
MODELS = {
    "normal": (lambda net: bdl.models.Regression(net, noise=0.4), LINE),
    "latent noise": (lambda net: bdl.models.Regression(net, noise=dist.HalfNormal(1.0)), LINE),
    "poisson": (bdl.models.PoissonRegression, (LINE + 1).round().abs()),
    "binary": (bdl.models.BinaryClassification, (LINE > 0.2).double()),
}


@functools.cache
def laplace(name):
    """A program, a posterior of it that all tests share, and its targets."""
    torch.manual_seed(0)
    make, y = MODELS[name]
    model = make(bdl.bayesianize(torch.nn.Linear(1, 1).double()))
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full")
    bdl.training.train(model, guide, X, y, steps=100, learning_rate=0.1, progress=False)
    return model, guide.laplace_approximation((X, y)), y


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("linearized", [True, False])
def test_moments_and_covariances_are_those_of_drawn_targets(name, linearized):
    model, posterior, _ = laplace(name)
    with nullcontext() if linearized else pytest.warns(BdlWarning, match="does not know all obs"):
        predictions = predictor(model, posterior, 8000, unknown="" if linearized else "all", seed=0)
    assert (predictions.samples is None) is linearized
    targets = predictions(Z)["y"].double()
    found = predictions.moments(Z)["y"]
    error = targets.std(0) / len(targets) ** 0.5
    assert ((found.mean - targets.mean(0)).abs() < 5 * error).all()
    torch.testing.assert_close(found.variance, targets.var(0), rtol=0.06, atol=1e-3)
    mean, covariance = predictions.covariance(Z)["y"]
    torch.testing.assert_close(mean.reshape(3), found.mean, rtol=0.05, atol=5e-3)
    torch.testing.assert_close(covariance.reshape(3), found.variance, rtol=0.05, atol=1e-3)
    joint = predictions.joint_covariance(Z)["y"].covariance.reshape(3, 3)
    torch.testing.assert_close(joint.diagonal(), covariance.reshape(3), rtol=0.05, atol=1e-3)


def test_draws_of_another_program_are_refused_and_closed_forms_are_of_the_linearized_program():
    model, posterior, y = laplace("normal")
    program = bdl.Program(model, X, y)
    other = bdl.Samples({"v": torch.randn(1, 5, 2)})
    with pytest.raises(ValueError, match="the posterior is of another program"):
        predictor(model, other, latents=program.latents)
    sampled = bdl.Predictive(model, posterior, 10)
    assert sampled.closed_predictions(X, y) == {} and sampled.samples is None
    closed = predictor(model, posterior, latents=program.latents).closed_predictions(X, y)["y"]
    moments = bdl.LinearizedPredictive(model, posterior).moments(X)["y"]
    torch.testing.assert_close(closed.variance, moments.variance)
    exact = dist.Normal(closed.mean, closed.variance.sqrt()).log_prob(y)
    torch.testing.assert_close(closed.log_density, exact)

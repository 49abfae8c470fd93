"""The limiting functional against closed forms of one hidden layer (Huix et al. 2022)."""

import math

import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.elbo import MeanFieldLimit, TemperedTraceMeanField_ELBO

X = torch.linspace(0.1, 1.5, 12, dtype=torch.float64)[:, None]
Y = X[:, 0].sin()
MEAN_RELU = 0.8413447460685429 + math.exp(-0.5) / math.sqrt(2 * math.pi)  # of Normal(1, 1)
MEAN_RELU_SQUARE = 2 * 0.8413447460685429 + math.exp(-0.5) / math.sqrt(2 * math.pi)


class Averaged(nn.Module):
    """f(x) = 1/N sum_j a_j relu(b_j x)."""

    def __init__(self, width):
        super().__init__()
        self.b = nn.Linear(1, width, bias=False, dtype=torch.float64)
        self.a = nn.Linear(width, 1, bias=False, dtype=torch.float64)

    def forward(self, x):
        return self.a(self.b(x).relu()) / len(self.b.weight)


def setting(width, temperature=1.0):
    """A program, and a guide with a_j, b_j ~ Normal(1, 1) for every neuron."""
    model = bdl.models.Regression(bdl.bayesianize(Averaged(width), bdl.priors.Normal(1.0)), noise=1)
    guide = bdl.guides.AutoMeanField(model, init_scale=1.0).prototype(X, Y)
    guide.loc.data.fill_(1.0)
    return model, guide


@pytest.mark.parametrize("width", [10, 200])
def test_the_gap_to_the_elbo_is_of_order_p_over_n(width):
    """For unit noise it is p / N times mean_i Var[a relu(b x_i)] / 2, for every N."""
    model, guide = setting(width)
    found = []
    for elbo in (MeanFieldLimit, TemperedTraceMeanField_ELBO):
        pair = elbo(num_particles=600)
        pair.loss(model, guide, X, Y)  # the first call also checks the program, and draws for it
        torch.manual_seed(1)
        found.append(pair.loss(model, guide, X, Y))
    variance = 2 * MEAN_RELU_SQUARE - MEAN_RELU**2
    exact = (X.square().mean() * variance / 2).item()
    # The same draws give both, so that their difference is the sample variance of 600 outputs,
    # which is that of one function: relative sd sqrt(2 / 600), more for few, skewed neurons.
    assert (found[1] - found[0]) * width / len(X) == pytest.approx(exact, rel=0.2)


def test_its_gradient_is_that_of_the_mean_output():
    """d/dm of log p(y | x m) for f(x) = w x, at any draws whose mean is m."""
    net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model = bdl.models.Regression(bdl.bayesianize(net), noise=0.5, num_data=24)
    guide = bdl.guides.AutoMeanField(model, init_scale=1e-9).prototype(X, Y)
    loss = MeanFieldLimit(1e-12, num_particles=3)(model, guide)
    (found,) = torch.autograd.grad(loss(X, Y), [guide.loc])
    residual = Y - X[:, 0] * guide.loc.detach()
    expected = -2 * (residual * X[:, 0]).sum() / 0.5**2  # 24 data of which 12 are seen
    torch.testing.assert_close(found, expected[None], rtol=1e-6, atol=0)


def test_classes_have_their_mean_logits():
    net = nn.Linear(1, 3, bias=False, dtype=torch.float64)
    model = bdl.models.Classification(bdl.bayesianize(net))
    labels = torch.arange(12) % 3
    guide = bdl.guides.AutoMeanField(model).prototype(X, labels)
    elbo = MeanFieldLimit(num_particles=5)
    elbo.loss(model, guide, X, labels)
    torch.manual_seed(2)
    elbo.loss(model, guide, X, labels)
    torch.manual_seed(2)
    mean = guide.sample_vectors(5).mean(0).detach()
    expected = dist.Categorical(logits=X @ mean[None]).log_prob(labels).sum()
    torch.testing.assert_close(elbo.expected_log_likelihood, expected)


def test_refusals():
    model, guide = setting(3)
    with pytest.raises(TypeError, match="averages outputs over draws of a guide of pyro_bdl"):
        MeanFieldLimit().loss(model, AutoNormal(model), X, Y)
    with (
        bdl.handlers.local_reparameterization(),
        pytest.raises(ValueError, match="cannot use"),
    ):
        MeanFieldLimit().loss(model, guide, X, Y)

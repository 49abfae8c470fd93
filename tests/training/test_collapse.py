"""Guides that are the prior, and guides that know the data."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import training
from pyro_bdl.errors import BdlWarning

DOUBLE = {"dtype": torch.float64}


class Wide(nn.Module):
    """f(x) = 1/N sum_j a_j relu(b_j x): at temperature 1 the best guide ignores the data."""

    def __init__(self, width):
        super().__init__()
        self.b = nn.Linear(1, width, bias=False, **DOUBLE)
        self.a = nn.Linear(width, 1, bias=False, **DOUBLE)

    def forward(self, x):
        return self.a(self.b(x).relu()) / len(self.b.weight)


def program(width):
    return bdl.models.Regression(bdl.bayesianize(Wide(width)), noise=1.0)


X = torch.linspace(-1, 1, 40, **DOUBLE)[:, None]
Y = X[:, 0].abs()


def test_the_prior_has_collapsed_and_its_numbers_are_exact():
    model = program(5)
    guide = bdl.guides.AutoMeanField(model, init_scale=1.0)
    guide.prototype(X, Y).loc.data.zero_()
    found = training.collapse(model, guide, X, Y)
    assert found.kl == pytest.approx(0.0, abs=1e-9) and found.variation < 0.2
    # A guide that is certain of a_j = 5, b_j = 1 says relu(x).
    with torch.no_grad():
        guide.loc.copy_(torch.tensor([1.0] * 5 + [5.0] * 5))
        guide.scale = torch.full((10,), 1e-3, **DOUBLE)
    found = training.collapse(model, guide, X, Y)
    relu = 5 * X[:, 0].relu()
    assert found.variation == pytest.approx((relu.std() / Y.std()).item(), rel=1e-2)
    kl = 10 * (-math.log(1e-3) - 0.5 + 0.5e-6) + 0.5 * (5 * 1.0 + 5 * 25.0)
    assert found.kl == pytest.approx(kl / 40, rel=1e-9) and not found.complete


def test_classes_by_their_probabilities():
    net = nn.Linear(1, 2, **DOUBLE)
    model = bdl.models.Classification(bdl.bayesianize(net))
    guide = bdl.guides.AutoMeanField(model, init_scale=1e-4)
    labels = (X[:, 0] > 0).long()
    guide.prototype(X, labels).loc.data.copy_(torch.tensor([-50.0, 50.0, 0.0, 0.0]))
    assert training.collapse(model, guide, X, labels).variation == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("eta", [1.0, 0.01])
def test_training_warns_at_temperature_1(eta):
    torch.manual_seed(0)
    model = program(200)
    guide = bdl.guides.AutoMeanField(model, init_scale=0.99)
    guide.prototype(X, Y).loc.data.zero_()
    elbo = bdl.elbo.TemperedTraceMeanField_ELBO(eta)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        training.train(model, guide, X, Y, steps=2, elbo=elbo, learning_rate=1e-3)
    told = [w for w in seen if "collapsed to the prior" in str(w.message)]
    assert len(told) == (1 if eta == 1.0 else 0)
    assert all(issubclass(w.category, BdlWarning) for w in told)
    assert all("overparameterized(tau, num_data, num_neurons)" in str(w.message) for w in told)


def scaled(where):
    """A line with a scale as a PyroParam: of the prior, of the noise, or nowhere."""
    one = pyro.nn.PyroParam(torch.tensor(1.0, **DOUBLE), constraint=dist.constraints.positive)
    prior = bdl.priors.Normal(one if where == "prior" else 1.0)
    net = bdl.bayesianize(nn.Linear(1, 1, **DOUBLE), prior)
    return bdl.models.Regression(net, noise=one if where == "noise" else 1.0)


@pytest.mark.parametrize(
    "where, family, alone, told",
    [
        ("prior", bdl.guides.AutoMAP, False, True),
        ("prior", bdl.guides.AutoLaplaceGGN, False, True),
        ("prior", bdl.guides.AutoMCDropout, False, True),
        ("prior", bdl.guides.AutoMAP, True, False),
        ("prior", bdl.guides.AutoMeanField, False, False),
        ("noise", bdl.guides.AutoMAP, False, False),
        ("nowhere", bdl.guides.AutoMAP, False, False),
    ],
)
def test_scales_of_the_prior_are_not_trained_with_a_point(where, family, alone, told):
    model = scaled(where)
    guide = family(model).prototype(X, Y)
    optimizer = torch.optim.Adam(guide.parameters()) if alone else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BdlWarning)
        training.train(model, guide, X, Y, steps=2, optimizer=optimizer)
    found = [w for w in caught if "have no maximum together" in str(w.message)]
    assert bool(found) == told
    if told:
        assert "network.hyper_prior_scale of the prior" in str(found[0].message)
        assert found[0].filename == __file__

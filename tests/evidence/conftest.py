"""Bayesian linear regression with a learned prior scale and noise: the evidence in closed form."""

import warnings
from typing import NamedTuple

import pytest
import torch
from helpers.conjugate import Conjugate, with_ones
from helpers.parameters import AroundOne, learned
from scipy.optimize import minimize
from torch import nn

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import AutoLaplaceGGN


@pytest.fixture(autouse=True)
def _double(_fresh):
    torch.set_default_dtype(torch.float64)


class Line:
    """y ~ Normal(X w + b, s^2) with w, b ~ Normal(0, a^2)."""

    def __init__(self, size=12, features=3, noise=0.5, prior=0.7, learn_noise=True, **options):
        torch.manual_seed(7)
        self.x = torch.randn(size, features)
        self.y = self.x @ torch.linspace(1.0, -2.0, features) + 0.3 + 0.4 * torch.randn(size)
        self.design = with_ones(self.x)
        self.prior, self.noise = prior, noise
        self.bnn = bayesianize(nn.Linear(features, 1), priors.Normal(learned(prior)))
        noise = learned(noise) if learn_noise else noise
        self.model = models.Regression(self.bnn, noise=noise, **options)

    @property
    def data(self):
        return self.x, self.y

    def exact(self, a=None, s=None):
        """log p(y | a, s)."""
        a = torch.as_tensor(self.prior if a is None else a)
        s = torch.as_tensor(self.noise if s is None else s)
        return Conjugate(self.design, self.y, s, a).evidence

    def precision(self, a=None, s=None, eta=1.0):
        a, s = self.prior if a is None else a, self.noise if s is None else s
        return Conjugate(self.design, self.y, s, a, eta).precision

    def mode(self, a=None, s=None, eta=1.0):
        a, s = self.prior if a is None else a, self.noise if s is None else s
        return Conjugate(self.design, self.y, s, a, eta).mean

    def best(self):
        """The maximum of the evidence in both, and where it is."""
        found = minimize(
            lambda t: -self.exact(*torch.tensor(t).exp()).item(), [0.0, -0.7], tol=1e-10
        )
        return -found.fun, *torch.tensor(found.x).exp()

    def laplace(self, data=None, loc=None, model=None, **options):
        """The Laplace guide at the mode, or elsewhere."""
        guide = AutoLaplaceGGN(model or self.model, **{"structure": "full", **options})
        guide.prototype(*self.data)
        with torch.no_grad():
            guide.loc.copy_(self.mode() if loc is None else loc)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BdlWarning)
            return guide.laplace_approximation(self.data if data is None else data)


@pytest.fixture
def line():
    return Line()


@pytest.fixture
def make_line():
    return Line


@pytest.fixture
def learn():
    return learned


class Scales(NamedTuple):
    """A prior of (w, b) of three features, its parameters, and the variances (4,) by these."""

    prior: object
    start: list
    variances: object


def _scales(kind):
    ones = torch.ones(4)
    return {
        "ard": lambda: Scales(
            priors.ByName(
                {"weight": priors.Normal(learned([0.4, 0.9, 1.5])), "bias": priors.Normal(0.6)}
            ),
            [0.4, 0.9, 1.5],
            lambda t: torch.cat([t.square(), t.new_tensor([0.36])]),
        ),
        "per layer": lambda: Scales(
            priors.PerLayer(priors.Normal(learned(0.8))), [0.8], lambda t: t.square() * ones
        ),
        "by name": lambda: Scales(
            priors.ByName(
                {"weight": priors.Normal(learned(0.4)), "bias": priors.Normal(learned(0.6))}
            ),
            [0.4, 0.6],
            lambda t: torch.cat([t[:1].expand(3), t[1:]]).square(),
        ),
        "fan-in": lambda: Scales(
            priors.FanIn(learned(0.8)),
            [0.8],
            lambda t: t.square() / t.new_tensor([3.0, 3.0, 3.0, 1.0]),
        ),
        "around one": lambda: Scales(AroundOne(learned(0.8)), [0.8], lambda t: t.square() * ones),
    }[kind]()


@pytest.fixture(params=["ard", "per layer", "by name", "fan-in", "around one"])
def scales(request):
    """Priors whose scales are parameters of every shape."""
    return _scales(request.param)


@pytest.fixture
def values():
    """The present values of a guide's hyperparameters, prior scale and noise."""

    def values(guide):
        found = guide.read().parameters
        return {name.rpartition(".")[2]: p.value.detach() for name, p in found.items()}

    return values


@pytest.fixture
def put():
    """Set a guide's hyperparameters."""

    def put(guide, **chosen):
        for name, parameter in guide.read().parameters.items():
            for key, value in chosen.items():
                if key in name:
                    parameter.set(torch.as_tensor(value).expand_as(parameter.value))

    return put

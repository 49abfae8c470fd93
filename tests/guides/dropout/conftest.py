"""Data, a network and its program."""

import pytest
import torch
from torch import nn

from pyro_bdl import bayesianize, models, priors

D = torch.float64


@pytest.fixture
def data():
    return torch.randn(7, 2, dtype=D), torch.randn(7, dtype=D)


@pytest.fixture
def net():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).to(D)


@pytest.fixture
def model(net):
    return models.Regression(bayesianize(net, priors.Normal(0.7)), noise=0.5)

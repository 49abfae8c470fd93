"""Networks that observe data of every kind."""

import torch
from torch import nn

from pyro_bdl import bayesianize, models


def net(out=2):
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, out))


def observations(kind):
    """A program over an MLP, with x and y."""
    torch.manual_seed(2)
    x = torch.randn(6, 3)
    if kind == "normal":
        return models.Regression(bayesianize(net()), noise=0.4), x, torch.randn(6, 2)
    if kind == "noise":
        return models.Regression(bayesianize(net())), x, torch.randn(6, 2)
    if kind == "heteroscedastic":
        return models.HeteroscedasticRegression(bayesianize(net())), x, torch.randn(6)
    if kind == "categorical":
        return models.Classification(bayesianize(net(3))), x, torch.randint(0, 3, (6,))
    if kind == "pixels":
        conv = nn.Sequential(
            nn.Linear(3, 8), nn.Tanh(), nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 3, 3)
        )
        bnn = bayesianize(nn.Sequential(*conv, Transposed()))
        return models.Classification(bnn), x, torch.randint(0, 3, (6, 6))
    if kind == "bernoulli":
        return models.BinaryClassification(bayesianize(net(1))), x, torch.randint(0, 2, (6,))
    assert kind == "poisson"
    return models.PoissonRegression(bayesianize(net())), x, torch.poisson(torch.ones(6, 2))


class Transposed(nn.Module):
    def forward(self, x):
        return x.mT


KINDS = ["normal", "noise", "heteroscedastic", "categorical", "pixels", "bernoulli", "poisson"]

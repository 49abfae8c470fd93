"""A small regression, and guides of each kind of noise, for trainings in JAX."""

import torch
from guides.conftest import TRAINED
from torch import nn

import pyro_bdl as bdl

FAMILIES = {family.__name__: family for family in TRAINED} | {
    "AutoMCDropout": lambda model: bdl.guides.AutoMCDropout(model, p=0.3, sites="all"),
    "Gaussian dropout": lambda model: bdl.guides.AutoMCDropout(
        model, p=0.3, sites="all", noise=bdl.guides.GaussianNoise()
    ),
    "learned rates": lambda model: bdl.guides.AutoMCDropout(
        model, p=0.3, sites="all", learn_p=True,
        noise=bdl.guides.BernoulliNoise(temperature=lambda step: 0.05 + 0.02 * step),
    ),
}  # fmt: skip


def data(rows=40):
    x = torch.linspace(-1.0, 1.0, rows)[:, None]
    return x, torch.sin(3 * x[:, 0]) + 0.1 * torch.cos(40 * x[:, 0])


def network(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 5), *layers, nn.Tanh(), nn.Linear(5, 1))


def program(net=None, noise=0.3):
    bnn = bdl.bayesianize(network() if net is None else net)
    return bdl.models.Regression(bnn, noise=noise, num_data=40)

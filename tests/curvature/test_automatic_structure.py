"""The structure that "auto" takes."""

import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.curvature import automatic_structure
from pyro_bdl.guides import AutoLaplaceGGN

pytestmark = pytest.mark.filterwarnings("ignore:the guide is not at a maximum")


def chosen(prior=None, data=None, **options):
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))  # 50 weights
    x, y = torch.randn(10, 3), torch.randn(10, 2)  # 20 outputs
    model = models.Regression(bayesianize(net, prior), noise=dist.HalfNormal(1.0))
    guide = AutoLaplaceGGN(model, structure="auto", **options).prototype(x, y)
    return guide.laplace_approximation(data or (x, y)).config.structure


def test_by_size(monkeypatch):
    assert chosen() == "full"
    monkeypatch.setattr(automatic_structure, "_FULL_UP_TO", 40)
    assert chosen() == "kernel"  # 40 rows: of location and noise
    x, y = torch.randn(30, 3), torch.randn(30, 2)
    assert chosen(data=(x, y)) == "kron"
    assert chosen(data=[(x[:8], y[:8]), (x[8:14], y[8:14])]) == "kron"
    assert chosen(data=[(x[:8], y[:8]), (x[8:12], y[8:12])]) == "kernel"
    assert chosen(curvature="empirical-fisher", data=(x, y)) == "kernel"  # one row a datum
    monkeypatch.setattr(automatic_structure, "_KERNEL_UP_TO", 30)
    assert chosen() == "kron"


def test_by_memory(monkeypatch):
    monkeypatch.setattr(automatic_structure, "available_memory", lambda device: 100)
    assert chosen() == "kron"


def test_by_prior(monkeypatch):
    """Under a hyperprior, the prior precision may be indefinite."""
    monkeypatch.setattr(automatic_structure, "_FULL_UP_TO", 40)
    assert chosen(priors.Normal(dist.HalfNormal(0.05))) == "kron"


def test_over_parts_of_sites(monkeypatch):
    monkeypatch.setattr(automatic_structure, "_FULL_UP_TO", 4)
    assert chosen(subset=torch.arange(5)) == "full"


def test_it_is_no_hessian():
    with pytest.raises(ValueError, match='"hessian" needs structure="full"'):
        chosen(curvature="hessian")

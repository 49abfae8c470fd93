"""Each guide, each structure, chains, a comparison and the command, in two minutes: ``-m smoke``.

What an environment with other releases of torch, Pyro, NumPyro or ArviZ must be able to do.
"""

import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import guides
from pyro_bdl.app import command
from pyro_bdl.curvature.structures import STRUCTURES
from pyro_bdl.training import train

pytestmark = pytest.mark.smoke
TRAINED = [
    guides.AutoMAP,
    guides.AutoMeanField,
    guides.AutoLowRank,
    guides.AutoMatrixNormal,
    guides.AutoMCDropout,
    guides.AutoEnsemble,
]


@pytest.fixture
def problem():
    """A network, and 40 rows of y = sin 2x + noise."""
    x = torch.linspace(-2, 2, 40)[:, None]
    y = torch.sin(2 * x[:, 0]) + 0.1 * torch.randn(40)
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    return bdl.models.Regression(bdl.bayesianize(net), noise=0.2), x, y


def is_better_than_a_constant(model, posterior, x, y):
    """Whether the mean of f explains a part of the targets' variance."""
    mean = bdl.Predictive(model, posterior, 50)(x)["f"].mean(0).reshape(-1)
    return (mean - y).square().mean() < 0.8 * y.var()


@pytest.mark.parametrize("kind", TRAINED)
def test_guides(kind, problem):
    model, x, y = problem
    guide = kind(model)
    train(model, guide, x, y, steps=300, learning_rate=0.05)
    assert is_better_than_a_constant(model, guide, x, y)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structures(structure, problem):
    model, x, y = problem
    guide = guides.AutoLaplaceGGN(model, structure=structure)
    train(model, guide, x, y, steps=300, learning_rate=0.05)
    laplace = guide.laplace_approximation((x, y))
    moments = bdl.LinearizedPredictive(model, laplace).parameter_moments(x, sites=["f"])["f"]
    assert (moments.mean.reshape(-1) - y).square().mean() < 0.8 * y.var()
    assert (moments.variance > 0).all()


@pytest.mark.parametrize("kernel", ["nuts", "mclmc"])
def test_chains(kernel, problem):
    model, x, y = problem
    samples = bdl.mcmc.sample(
        model, x, y, kernel=kernel, num_warmup=100, num_samples=100, num_chains=2, seed=0
    )
    assert is_better_than_a_constant(model, samples, x, y)


def test_comparison_and_export(problem):
    model, x, y = problem
    guide = guides.AutoMeanField(model)
    train(model, guide, x, y, steps=300, learning_rate=0.05)
    compared = bdl.compare(model, {"mean-field": guide, "again": guide}, x, y, reference="again")
    assert "mean-field" in str(compared)
    assert "posterior" in bdl.to_arviz(model, guide, x, y)


def test_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--example", "in-between", "--guides", "map,mean-field,nuts", "--steps", "100"]
    chains = ["--chains", "2", "--warmup", "20", "--draws", "20"]
    assert command.main(["compare", *options, *chains, "--out", "out"]) == 0
    assert (tmp_path / "out" / "report.html").stat().st_size
    assert (tmp_path / "out" / "table.csv").stat().st_size

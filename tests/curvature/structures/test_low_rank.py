"""Leading eigenpairs without the matrix."""

import warnings

import pytest
import torch
from torch import nn

from pyro_bdl import LinearizedPredictive, bayesianize, models, priors
from pyro_bdl.curvature import LowRank
from pyro_bdl.curvature.at import ProgramAtPoint
from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.fit import fit_curvature
from pyro_bdl.guides import AutoLaplaceGGN
from pyro_bdl.program.subset import Subset


def mlp(oracle):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    model, (x, y) = oracle.classification(net, torch.randn(20, 3))
    return (*oracle.program(model, x, y), x, y)


def test_leading_eigenpairs(oracle):
    """Source: Halko, Martinsson & Tropp 2011, algorithm 4.4."""
    program, vector, x, y = mlp(oracle)
    exact = oracle.ggn(program, vector)
    curvature = oracle.fit(program, vector, (x, y), structure="low_rank", rank=6).curvature
    assert curvature.vectors.shape == (program.size, 6)
    torch.testing.assert_close(curvature.vectors.T @ curvature.vectors, torch.eye(6))
    values = torch.linalg.eigvalsh(exact).flip(0)[:6]
    torch.testing.assert_close(curvature.values, values, rtol=1e-3, atol=0)
    residual = exact @ curvature.vectors - curvature.vectors * curvature.values
    assert residual.norm() < 0.02 * values[0]
    assert (curvature.diagonal() <= exact.diagonal() + 1e-9).all()


def test_more_data(oracle):
    program, vector, x, y = mlp(oracle)
    at = ProgramAtPoint(program.model, Subset(program.layout), vector)
    config = CurvatureConfig(LowRank(program.size))
    first = fit_curvature(at, (x[:8], y[:8]), config).curvature
    both = fit_curvature(at, (x[8:], y[8:]), config, before=first).curvature
    found = both.vectors * both.values @ both.vectors.T
    torch.testing.assert_close(found, oracle.ggn(program, vector), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("structure", ["low_rank", "kernel", "full"])
@pytest.mark.parametrize(
    ("rows", "noise", "scale"), [(40, 0.5, 1e3), (40, 1e-4, 1e3), (3, 0.5, 1e3)]
)
def test_float32_under_a_wide_prior(structure, rows, noise, scale):
    """Curvature of 1e8 and 1e15 times the prior precision: no variance is a small difference of
    large ones."""
    torch.manual_seed(4)
    x, y = torch.randn(rows, 4), torch.randn(rows)
    covariance = torch.linalg.inv(x.mT @ x / noise**2 + torch.eye(4) / scale**2)
    net = nn.Linear(4, 1, bias=False)
    model = models.Regression(bayesianize(net, priors.Normal(scale)), noise=noise).float()
    x, y = x.float(), y.float()
    guide = AutoLaplaceGGN(model, structure=structure).prototype(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not at a maximum
        posterior = guide.laplace_approximation((x, y))
    found = LinearizedPredictive(model, posterior).parameter_moments(x[:3])["y"].variance["loc"]
    outputs = (x.double() @ covariance * x.double()).sum(-1)[:3]
    close = {"rtol": 1e-3, "atol": 0.0}
    torch.testing.assert_close(posterior.variances().double(), covariance.diagonal(), **close)
    torch.testing.assert_close(found.double(), outputs, **close)

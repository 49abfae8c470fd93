"""Full curvature, block by block."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.curvature.structures.full import FullCurvature, FullPrecision
from pyro_bdl.guides import AutoLaplaceGGN


def curvature(*diagonal):
    full = FullCurvature(SimpleNamespace(size=len(diagonal)), torch.zeros(0))
    full.matrix = torch.diag(torch.tensor(diagonal))
    return full


def test_the_log_determinant_and_its_derivatives():
    root = torch.randn(4, 4)
    matrix = (root @ root.T + torch.eye(4)).requires_grad_()

    def log_determinant(x):
        return FullPrecision(0.5 * (x + x.T)).logdet()

    torch.testing.assert_close(log_determinant(matrix), torch.logdet(matrix))
    assert torch.autograd.gradcheck(log_determinant, matrix)
    assert torch.autograd.gradgradcheck(log_determinant, matrix)


def test_eigenvalues_of_one_group_alone():
    full = curvature(3.0, 0.0, 1.0)
    (found,) = full.spectra([{"a": slice(0, 2), "b": slice(2, 3)}])
    torch.testing.assert_close(found, torch.tensor([0.0, 1.0, 3.0]))
    assert full.spectra([{"a": slice(0, 2)}, {"b": slice(2, 3)}]) is None
    indefinite = curvature(3.0, -1.0)
    assert indefinite.spectra([{"a": slice(0, 2)}]) is None


@pytest.mark.parametrize("case", ["few rows", "the same column twice"])
def test_float32_leaves_the_null_space_empty(case):
    """Curvature of 1e6 and more times the prior precision, in 5 of 20 directions, or 4 of 5."""
    torch.manual_seed(0)
    x = torch.randn(5, 20) if case == "few rows" else torch.randn(40, 4)[:, [0, 1, 2, 3, 0]]
    noise, scale = (1e-3, 1.0) if case == "few rows" else (0.5, 1e3)
    net = nn.Linear(x.shape[1], 1, bias=False)
    model = models.Regression(bayesianize(net, priors.Normal(scale)), noise=noise).float()
    y, exact = x.sum(1), torch.linalg.inv(x.mT @ x / noise**2 + torch.eye(x.shape[1]) / scale**2)
    guide = AutoLaplaceGGN(model, structure="full").prototype(x.float(), y.float())
    with torch.no_grad():
        guide.loc.fill_(1.0)
    posterior = guide.laplace_approximation((x.float(), y.float()))
    assert posterior.variances().dtype == torch.float32
    torch.testing.assert_close(posterior.variances().double(), exact.diagonal(), rtol=1e-3, atol=0)

"""Full curvature, block by block."""

import pytest
import torch
from torch import nn

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.curvature.jacobian.block_position import BlockPosition
from pyro_bdl.curvature.jacobian.jacobian import Jacobian, ProductBlock
from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.curvature.structures.full import FullCurvature, FullPrecision
from pyro_bdl.guides import AutoLaplaceGGN


def test_sums_of_outer_products(jacobian, positions):
    """The matrix sum_n J_n' J_n, row by row."""
    full, expected = FullCurvature(10, torch.zeros(0)), torch.zeros(10, 10)
    for _ in range(2):
        batch = jacobian(10, *positions)
        rows = batch.rows().flatten(0, 1)
        expected += rows.T @ rows
        full.add(batch)
    torch.testing.assert_close(full.matrix, expected)
    torch.testing.assert_close(full.diagonal(), expected.diagonal())


def test_scale_and_merge(jacobian):
    first, second = FullCurvature(4, torch.zeros(0)), FullCurvature(4, torch.zeros(0))
    first.add(jacobian(4, slice(0, 4)))
    second.add(jacobian(4, slice(1, 3)))
    expected = 2 * first.matrix + second.matrix
    first.scale(2)
    assert second.finish(first) is first
    torch.testing.assert_close(first.matrix, expected)


def test_a_matrix_is_kept():
    matrix = torch.eye(3)
    full = FullCurvature.from_matrix(matrix)
    assert full.matrix is matrix and full.size == 3


def test_prior_and_factor(jacobian):
    full = FullCurvature(4, torch.zeros(0))
    full.add(jacobian(4, slice(0, 4)))
    part = torch.tensor([[2.0, 0.5], [0.5, 3.0]])
    prior = PriorPrecision(torch.tensor([1.0, 2.0, 1.5, 3.0]), torch.tensor([1, 3]), part)
    expected = 0.5 * full.matrix + torch.diag(torch.tensor([1.0, 2.0, 1.5, 3.0]))
    expected[1, 3] += 0.5
    expected[3, 1] += 0.5
    factor = full.with_prior(prior, torch.tensor(0.5)).factor
    torch.testing.assert_close(factor @ factor.T, expected)


def test_the_log_determinant_and_its_derivatives():
    root = torch.randn(4, 4)
    matrix = (root @ root.T + torch.eye(4)).requires_grad_()

    def log_determinant(x):
        return FullPrecision(0.5 * (x + x.T)).logdet()

    torch.testing.assert_close(log_determinant(matrix), torch.logdet(matrix))
    assert torch.autograd.gradcheck(log_determinant, matrix)
    assert torch.autograd.gradgradcheck(log_determinant, matrix)


def test_eigenvalues_of_one_group_alone():
    matrix = torch.diag(torch.tensor([3.0, 0.0, 1.0]))
    full = FullCurvature.from_matrix(matrix)
    (found,) = full.spectra([{"a": slice(0, 2), "b": slice(2, 3)}])
    torch.testing.assert_close(found, torch.tensor([0.0, 1.0, 3.0]))
    assert full.spectra([{"a": slice(0, 2)}, {"b": slice(2, 3)}]) is None
    indefinite = FullCurvature.from_matrix(torch.diag(torch.tensor([3.0, -1.0])))
    assert indefinite.spectra([{"a": slice(0, 2)}]) is None


def test_layers_of_products_add_up_without_rows():
    """Sums over the columns first, then over the data: the same matrix as from rows."""
    torch.manual_seed(0)
    a, b = torch.randn(5, 1, 1, 3), torch.randn(5, 1, 1, 2)
    g, h = torch.randn(4, 5, 1, 1, 2), torch.randn(4, 5, 1, 1, 3)
    blocks = [
        ProductBlock(BlockPosition(("a", 0), slice(0, 6)), lambda: a, g, torch.Size((1, 2, 3))),
        ProductBlock(BlockPosition(("bias", 0), slice(6, 8)), None, g, torch.Size((1, 2, 1))),
        ProductBlock(BlockPosition(("b", 0), slice(8, 14)), lambda: b, h, torch.Size((1, 3, 2))),
    ]
    jacobian = Jacobian(blocks, 4, 5, 14, torch.zeros(0))
    full, rows = FullCurvature(14, torch.zeros(0)), jacobian.rows().flatten(0, 1)
    full.add(jacobian)
    torch.testing.assert_close(full.matrix, rows.T @ rows)


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

"""Full curvature, block by block."""

import torch

from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.curvature.structures.full import FullCurvature, FullPrecision


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

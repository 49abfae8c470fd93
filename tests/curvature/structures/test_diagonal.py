"""Diagonal curvature, block by block."""

import torch

from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.curvature.structures.diagonal import DiagonalCurvature


def test_sums_of_squares(jacobian, positions):
    """The diagonal of sum_n J_n' J_n is the sum of squared gradients."""
    diagonal, expected = DiagonalCurvature(10, torch.zeros(0)), torch.zeros(10)
    for _ in range(2):
        batch = jacobian(10, *positions)
        expected += batch.rows().square().sum((0, 1))
        diagonal.add(batch)
    torch.testing.assert_close(diagonal.diagonal(), expected)


def test_scale_and_merge(jacobian):
    first, second = DiagonalCurvature(4, torch.zeros(0)), DiagonalCurvature(4, torch.zeros(0))
    first.add(jacobian(4, slice(0, 4)))
    second.add(jacobian(4, slice(1, 3)))
    expected = 2 * first.diagonal() + second.diagonal()
    first.scale(2)
    assert second.finish(first) is first
    torch.testing.assert_close(first.diagonal(), expected)


def test_prior_and_factor(jacobian):
    diagonal = DiagonalCurvature(4, torch.zeros(0))
    diagonal.add(jacobian(4, slice(0, 4)))
    prior = torch.tensor([1.0, 2.0, 1.5, 3.0])
    found = diagonal.with_prior(PriorPrecision(prior), 0.5).diagonal
    torch.testing.assert_close(found, 0.5 * diagonal.values + prior)

"""Full and diagonal curvature, block by block."""

import torch

from pyro_bdl.curvature.jacobian.entries import Place
from pyro_bdl.curvature.jacobian.jacobian import Dense, Jacobian
from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.curvature.structures.dense import DiagonalCurvature, FullCurvature
from pyro_bdl.utils.linear_algebra import add_products


def jacobian(size, *places):
    """K = 2 columns for n = 3 data, dense in some places of a vector."""
    blocks = []
    for i, where in enumerate(places):
        count = where.stop - where.start if isinstance(where, slice) else len(where)
        blocks.append(Dense(Place((f"site{i}", -1), where), torch.randn(2, 3, count)))
    return Jacobian(blocks, 2, 3, size, torch.zeros(0))


def test_sums_of_outer_products():
    torch.manual_seed(0)
    cases = (
        [slice(0, 10)],
        [slice(0, 4), slice(6, 10)],
        [slice(2, 4)],
        [torch.tensor([7, 1]), slice(3, 4)],
        [],
    )
    for places in cases:
        full, diagonal = FullCurvature(10, torch.zeros(0)), DiagonalCurvature(10, torch.zeros(0))
        expected = torch.zeros(10, 10)
        for _ in range(2):
            batch = jacobian(10, *places)
            rows = batch.rows().flatten(0, 1)
            expected += rows.T @ rows
            full.add(batch)
            diagonal.add(batch)
        torch.testing.assert_close(full.matrix, expected)
        torch.testing.assert_close(full.diagonal(), expected.diagonal())
        torch.testing.assert_close(diagonal.diagonal(), expected.diagonal())


def test_scale_and_merge():
    torch.manual_seed(0)
    for kind in (FullCurvature, DiagonalCurvature):
        first, second = kind(4, torch.zeros(0)), kind(4, torch.zeros(0))
        first.add(jacobian(4, slice(0, 4)))
        second.add(jacobian(4, slice(1, 3)))
        expected = 2 * first.diagonal() + second.diagonal()
        first.scale(2)
        first.merge(second)
        torch.testing.assert_close(first.diagonal(), expected)


def test_prior_and_factor():
    torch.manual_seed(0)
    full = FullCurvature(4, torch.zeros(0))
    full.add(jacobian(4, slice(0, 4)))
    part = torch.tensor([[2.0, 0.5], [0.5, 3.0]])
    prior = PriorPrecision(torch.tensor([1.0, 2.0, 1.5, 3.0]), torch.tensor([1, 3]), part)
    expected = 0.5 * full.matrix + torch.diag(torch.tensor([1.0, 2.0, 1.5, 3.0]))
    expected[1, 3] += 0.5
    expected[3, 1] += 0.5
    factor = full.with_prior(prior, torch.tensor(0.5)).factor
    torch.testing.assert_close(factor @ factor.T, expected)


def test_products_are_added_in_place():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 601, generator=generator, dtype=torch.float64)  # halved twice, with odd ends
    start = torch.randn(601, 601, generator=generator, dtype=torch.float64)
    matrix = start.clone()
    add_products(matrix, x)
    torch.testing.assert_close(matrix, start + x.T @ x)

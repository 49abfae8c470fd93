"""Products and Cholesky factors."""

import torch

from pyro_bdl.utils.linear_algebra import add_products, cholesky


def test_products_are_added_in_place():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 601, generator=generator, dtype=torch.float64)  # halved twice, with odd ends
    start = torch.randn(601, 601, generator=generator, dtype=torch.float64)
    matrix = start.clone()
    add_products(matrix, x)
    torch.testing.assert_close(matrix, start + x.T @ x)


def test_a_factor_that_fails_under_vmap_is_nan():
    matrices = torch.stack([torch.eye(3), -torch.eye(3)])
    factors = torch.func.vmap(lambda matrix: cholesky(matrix, "it"))(matrices)
    assert torch.equal(factors[0], torch.eye(3, dtype=torch.float64)) and factors[1].isnan().all()

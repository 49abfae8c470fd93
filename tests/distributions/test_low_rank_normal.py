"""Diagonal plus low rank against dense matrices."""

import pytest
import torch

from pyro_bdl.distributions.low_rank_normal import (
    DiagonalPlusLowRank,
    PrecisionOfLowRankCovariance,
)

D = torch.float64


@pytest.fixture(params=[2, 0, 8], ids=["rank 2", "rank 0", "more rank than rows"])
def matrix(request):
    torch.manual_seed(3)
    scale = torch.rand(6, dtype=D) + 0.3
    return DiagonalPlusLowRank(scale, torch.randn(6, request.param, dtype=D))


def dense(matrix):
    return torch.diag(matrix.scale.square()) + matrix.factor @ matrix.factor.mT


def test_the_matrix(matrix):
    """M = diag(s^2) + W W' and log det M = 2 sum log s + log det (1 + F' F), the determinant
    lemma."""
    whole, x = dense(matrix), torch.randn(4, 6, dtype=D)
    torch.testing.assert_close(matrix.diagonal(), whole.diagonal())
    torch.testing.assert_close(matrix.log_det(), whole.logdet())
    torch.testing.assert_close(matrix.quadratic(x), torch.einsum("ni,ij,nj->n", x, whole, x))


def test_its_inverse_by_woodbury(matrix):
    """M^-1 = S^-2 - S^-1 F K^-1 F' S^-1 with K = 1 + F' F (Woodbury 1950)."""
    inverse, x = dense(matrix).inverse(), torch.randn(4, 6, dtype=D)
    torch.testing.assert_close(matrix.solve(x), x @ inverse)
    torch.testing.assert_close(matrix.inverse_diagonal(), inverse.diagonal())
    quadratic = torch.einsum("ni,ij,nj->n", x, inverse, x)
    torch.testing.assert_close(matrix.inverse_quadratic(x), quadratic)
    rows = matrix.inverse_root(x)
    torch.testing.assert_close(rows @ rows.mT, x @ inverse @ x.mT)


def test_draws_are_a_root_times_noise(matrix):
    """The covariance of draws, exactly: of the linear map from noise to draws."""
    size, rank = matrix.factor.shape
    for draw, covariance, noise in (
        (matrix.sample, dense(matrix), size + rank),
        (matrix.sample_inverse, dense(matrix).inverse(), size),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randn", lambda count, n, **kwargs: torch.eye(n, **kwargs))
            root = draw(noise)
        torch.testing.assert_close(root.mT @ root, covariance)


def test_an_inverse_in_single_precision():
    """Where the factor is much larger than the scales, no large numbers are subtracted."""
    torch.manual_seed(0)
    scale, factor = torch.full((50,), 0.1), 1e3 * torch.randn(50, 2)
    exact = DiagonalPlusLowRank(scale.double(), factor.double())
    single, x = DiagonalPlusLowRank(scale, factor), factor[:, 0]
    torch.testing.assert_close(
        single.inverse_quadratic(x).double(), exact.inverse_quadratic(x.double()), rtol=1e-3, atol=0
    )
    torch.testing.assert_close(
        single.inverse_diagonal().double(), exact.inverse_diagonal(), rtol=1e-3, atol=0
    )


def test_a_covariance_as_a_precision(matrix):
    precision, inverse = (
        PrecisionOfLowRankCovariance(matrix.scale, matrix.factor),
        dense(matrix).inverse(),
    )
    x = torch.randn(4, 6, dtype=D)
    torch.testing.assert_close(precision.logdet(), inverse.logdet())
    torch.testing.assert_close(precision.diagonal(), inverse.diagonal())
    torch.testing.assert_close(precision.quadratic(x), torch.einsum("ni,ij,nj->n", x, inverse, x))
    assert precision.sample(3).shape == (3, 6)

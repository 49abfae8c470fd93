"""The matrix normal against the dense Gaussian with covariance U kron V."""

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_bdl.distributions.matrix_normal import MatrixNormal

D = torch.float64


def factor(size, diagonal=False):
    if diagonal:
        return torch.rand(size, dtype=D) + 0.3
    return torch.randn(size, size, dtype=D).tril(-1) + torch.diag(torch.rand(size, dtype=D) + 0.3)


def make(kind, shape=(3, 2, 2)):
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    return MatrixNormal(
        torch.randn(shape, dtype=D),
        factor(rows, kind in ("rows", "both")),
        factor(columns, kind in ("columns", "both")),
    )


def dense(q):
    def matrix(f):
        return torch.diag(f.square()) if f.dim() == 1 else f @ f.mT

    covariance = torch.kron(matrix(q.row_factor), matrix(q.column_factor))
    return MultivariateNormal(q.loc.reshape(-1), covariance)


KINDS = ["triangular", "rows", "columns", "both"]


@pytest.mark.parametrize("kind", KINDS)
def test_density_moments_and_entropy(kind):
    """MN(M, U, V) is N(vec M, V kron U) on stacked columns (Gupta & Nagar 1999, section 2.2)."""
    q = make(kind)
    oracle = dense(q)
    x = torch.randn(5, 3, 2, 2, dtype=D)
    torch.testing.assert_close(q.log_prob(x), oracle.log_prob(x.flatten(1)))
    torch.testing.assert_close(torch.vmap(q.log_prob)(x), oracle.log_prob(x.flatten(1)))
    torch.testing.assert_close(q.entropy(), oracle.entropy())
    torch.testing.assert_close(q.variance.reshape(-1), oracle.variance)
    torch.testing.assert_close(q.covariance_matrix(), oracle.covariance_matrix)
    torch.testing.assert_close(q.precision_matrix(), oracle.precision_matrix)
    assert torch.equal(q.mean, q.loc)


def test_the_covariance_of_stacked_columns_is_v_kron_u():
    q = make("triangular", (3, 2))
    u, v = (f @ f.mT for f in (q.row_factor, q.column_factor))
    order = torch.arange(6).reshape(3, 2).T.reshape(-1)
    stacked = q.covariance_matrix()[order][:, order]
    torch.testing.assert_close(stacked, torch.kron(v, u))


@pytest.mark.parametrize("kind", KINDS)
def test_draws_have_the_covariance(kind):
    q = make(kind, (2, 3))
    draws = q.rsample((20000,)).flatten(1)
    oracle = dense(q)
    matrix = oracle.covariance_matrix
    variances = matrix.diagonal()
    error = ((variances[:, None] * variances + matrix.square()) / len(draws)).sqrt()
    assert ((torch.cov(draws.T) - matrix).abs() < 4.5 * error).all()
    assert ((draws.mean(0) - oracle.mean).abs() < 4.5 * (variances / len(draws)).sqrt()).all()
    assert q.rsample().shape == (2, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_to_and_from_independent_normals(kind):
    q = make(kind)
    loc, scale = torch.randn(3, 2, 2, dtype=D), torch.rand(3, 2, 2, dtype=D) + 0.2
    normal = dist.Normal(loc, scale).to_event(3)
    flat = MultivariateNormal(loc.reshape(-1), torch.diag(scale.reshape(-1).square()))
    torch.testing.assert_close(kl_divergence(q, normal), kl_divergence(dense(q), flat))
    torch.testing.assert_close(kl_divergence(normal, q), kl_divergence(flat, dense(q)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_kl_of_two(kind, other):
    """KL = 1/2 [tr(P^-1 Q) + d' P^-1 d - pq + log det P - log det Q] with dense covariances."""
    q, p = make(kind), make(other)
    torch.testing.assert_close(kl_divergence(q, p), kl_divergence(dense(q), dense(p)))


def test_no_closed_form_is_made_up():
    q = make("triangular", (3, 2))
    for prior in (
        dist.Laplace(torch.zeros(3, 2, dtype=D), 1.0).to_event(2),
        dist.Normal(torch.zeros(2, dtype=D), 1.0).to_event(1),
    ):
        with pytest.raises(NotImplementedError):
            kl_divergence(q, prior)


def test_a_mean_that_does_not_fit():
    with pytest.raises(ValueError, match=r"shape \(3, 2\) does not fit 3 rows and 3 columns"):
        MatrixNormal(torch.zeros(3, 2), torch.eye(3), torch.eye(3))

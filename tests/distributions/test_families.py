"""Draws that ``vmap`` can make: of the laws of torch's own."""

import pyro.distributions as dist
import pytest
import torch
from scipy import stats

from pyro_bdl.distributions.families import FAMILIES, sample_of
from pyro_bdl.distributions.parameters import base_distribution

COUNT = 4000
ONE = torch.tensor(1.0)

# By the family whose entry draws it
CASES = {
    "Cauchy": dist.HalfCauchy(2 * ONE),
    "Laplace": dist.Laplace(ONE, 2 * ONE),
    "StudentT": dist.StudentT(3 * ONE, ONE, 2 * ONE),
    "Beta": dist.Beta(0.5 * ONE, 2 * ONE),
    "Dirichlet": dist.Dirichlet(torch.tensor([0.5, 1.0, 3.0])),
    "Exponential": dist.Weibull(2 * ONE, 1.5 * ONE),
    "LKJCholesky": dist.LKJCholesky(4, 1.5 * ONE),
    "MultivariateNormal": dist.MultivariateNormal(
        torch.ones(2), torch.tensor([[2.0, 0.9], [0.9, 1.0]])
    ),
}


def test_every_entry_has_a_case():
    assert set(CASES) == {name for name, family in FAMILIES.items() if family.draw is not None}


@pytest.mark.parametrize("name", CASES)
def test_a_draw_under_vmap_has_the_law_of_torchs(name):
    known = CASES[name].expand((2,)).mask(torch.ones(2, dtype=torch.bool)).to_event(1)

    def draw(scale):
        value = sample_of(known)
        assert value.shape == known.shape()
        return value

    found = torch.vmap(draw, randomness="different")(torch.ones(COUNT))
    expected = known.sample((COUNT,))
    assert base_distribution(known).support.check(found).all()
    flat = found.reshape(COUNT, -1)
    if name != "LKJCholesky":  # torch's are wrong from the third row on
        for one, other in zip(flat.T, expected.reshape(COUNT, -1).T, strict=True):
            assert stats.ks_2samp(one.numpy(), other.numpy()).pvalue > 1e-5
    assert not torch.equal(flat[:, -1], flat[:, flat.shape[1] // 2 - 1])


def test_the_correlations_of_lkj_draws():
    """Each correlation r has (r + 1) / 2 ~ Beta(eta + d/2 - 1, the same), also with a batch of eta,
    one of which each draw has its own."""
    d = 4
    eta = torch.tensor([0.7, 3.0])
    factor = torch.vmap(lambda e: sample_of(dist.LKJCholesky(d, e)), randomness="different")(
        eta.repeat(COUNT, 1)
    )
    correlations = factor @ factor.mT
    torch.testing.assert_close(
        correlations.diagonal(dim1=-2, dim2=-1), torch.ones(COUNT, 2, d), atol=1e-5, rtol=0
    )
    for k in range(2):
        a = float(eta[k]) + d / 2 - 1
        for i in range(d):
            for j in range(i):
                half = (correlations[:, k, i, j] + 1) / 2
                assert stats.kstest(half.numpy(), stats.beta(a, a).cdf).pvalue > 1e-5


def test_the_joint_draws_of_a_normal():
    known = CASES["MultivariateNormal"]
    found = torch.vmap(lambda _: sample_of(known), randomness="different")(torch.ones(COUNT))
    torch.testing.assert_close(torch.cov(found.T), known.covariance_matrix, atol=0.2, rtol=0)

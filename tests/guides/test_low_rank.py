"""Diagonal plus low rank: Pyro's family and its exact optimum."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import TraceMeanField_ELBO
from pyro.infer.autoguide import AutoLowRankMultivariateNormal
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.guides import AutoLowRank
from pyro_bdl.program import record

D = torch.float64


def parts(size=6, rank=2):
    torch.manual_seed(3)
    return torch.rand(size, dtype=D) + 0.3, torch.randn(size, rank, dtype=D)


def dense(scale, factor):
    return torch.diag(scale.square()) + factor @ factor.mT


def constrained():
    a = pyro.sample("a", dist.Normal(torch.zeros(2, dtype=D), 1.0).to_event(1))
    s = pyro.sample("s", dist.HalfNormal(torch.ones((), dtype=D)))
    w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=D), s).to_event(1))
    pyro.sample("y", dist.Normal(a.sum() + w.sum(), 1.0), obs=torch.zeros((), dtype=D))


@pytest.fixture
def guide():
    guide = AutoLowRank(constrained, rank=2).prototype()
    scale, factor = parts()
    with torch.no_grad():
        guide.loc.copy_(torch.tensor([0.5, -1.0, -0.7, 0.2, 0.1, -0.4], dtype=D))
        guide.scale = scale
        guide.factor.copy_(0.4 * factor / scale[:, None])
    return guide


def test_it_is_pyros_family(guide):
    theirs = AutoLowRankMultivariateNormal(constrained, rank=2)
    theirs()
    with torch.no_grad():
        theirs.loc.data = guide.loc.detach().clone()
        theirs.scale = guide.scale.detach().clone()
        theirs.cov_factor.data = guide.factor.detach().clone()
    mine, other = guide.get_posterior(), theirs.get_posterior()
    torch.testing.assert_close(mine.covariance_matrix, other.covariance_matrix)
    vectors = guide.sample_vectors(5)
    log_det = guide.layout.constrain(vectors)[1]
    torch.testing.assert_close(
        torch.vmap(guide.log_density)(vectors, log_det), other.log_prob(vectors) - log_det
    )
    torch.testing.assert_close(guide.entropy(vectors[0], log_det[0]) - log_det[0], other.entropy())
    torch.testing.assert_close(guide.variances(), other.variance)
    levels = [0.1, 0.5, 0.9]
    for name, value in theirs.quantiles(levels).items():
        expected = torch.stack(list(value)) if isinstance(value, list) else value
        torch.testing.assert_close(
            guide.quantiles(levels)[name], expected.to(D), rtol=1e-5, atol=1e-6
        )


def test_the_kl_is_that_of_dense_normals(conjugate):
    """KL(N(m, S) || N(n, T)) = 1/2 [tr(T^-1 S) + d' T^-1 d - P + log det T - log det S]."""
    guide = AutoLowRank(conjugate.model, rank=2).prototype(conjugate.x, conjugate.y)
    scale, factor = parts(4)
    with torch.no_grad():
        guide.scale = scale
        guide.factor.copy_(factor / scale[:, None])
    q = MultivariateNormal(guide.loc, dense(scale, factor))
    p = MultivariateNormal(torch.zeros(4, dtype=D), 4.0 * torch.eye(4, dtype=D))
    vector = guide.sample_vectors(1)[0]
    values, log_det = guide.layout.constrain(vector)
    run = record(conjugate.model, values, (conjugate.x, conjugate.y))
    torch.testing.assert_close(guide.kl(vector, log_det, run), kl_divergence(q, p))


def test_the_kl_where_a_prior_depends_on_another_latent(guide):
    """The closed form for 'a' alone: with w and s correlated under q, E[log p(w | s)] is no
    function of w's moments at the draw of s."""
    with torch.no_grad():  # log s = eta / 2 and w = 1 + eta / 2, but for little: as one they move
        guide.loc.copy_(torch.tensor([0.5, -1.0, 0.0, 1.0, 1.0, 1.0], dtype=D))
        guide.scale = torch.full((6,), 0.1, dtype=D)
        guide.factor.copy_(torch.tensor([[0.0, 5.0]], dtype=D).expand(6, 2))
    vectors = guide.sample_vectors(20_000).detach()
    log_det = guide.layout.constrain(vectors)[1]

    def both(vector, volume):
        run = record(constrained, guide.layout.constrain(vector)[0])
        drawn = guide.log_density(vector, volume) - run.log_prior()
        return guide.kl(vector, volume, run) - drawn

    with torch.no_grad(), pyro.validation_enabled(False):
        difference = torch.vmap(both)(vectors, log_det)
    assert difference.std() > 0.1
    assert difference.mean().abs() < 4 * difference.std() / 20_000**0.5


def test_pyros_own_mean_field_bound_is_right_too():
    """Dropping a Delta's log density would lose the entropy and the log determinant."""

    def model():
        s = pyro.sample("s", dist.LogNormal(torch.tensor(0.3, dtype=D), 0.5))
        pyro.sample("y", dist.Normal(torch.zeros((), dtype=D), 1.0), obs=torch.zeros_like(s))

    guide = AutoLowRank(model, rank=1).prototype()
    with torch.no_grad():
        guide.loc.fill_(0.3)
        guide.scale = torch.tensor([0.3], dtype=D)
        guide.factor.fill_(0.4 / 0.3)
    # q is the prior: log q - log p = 0 at every draw
    value = TraceMeanField_ELBO().loss(model, guide)
    assert value == pytest.approx(0.5 * math.log(2 * math.pi))


def optimal(conjugate, eta=1.0):
    """diag(s^2) + W W' = C with s^2 just below C's lowest eigenvalue."""
    values, vectors = torch.linalg.eigh(conjugate.precision(eta).inverse())
    floor = 0.9 * values[0]
    return floor.sqrt().expand(4), vectors * (values - floor).sqrt()


@pytest.mark.parametrize("eta", [1.0, 0.3])
def test_the_exact_optimum_of_a_conjugate_model(conjugate, exact_expectations, eta):
    """The gradient of the ELBO vanishes at the exact posterior (Ong, Nott & Smith 2018)."""
    guide = AutoLowRank(conjugate.model, rank=4).prototype(conjugate.x, conjugate.y)
    scale, factor = optimal(conjugate, eta)
    with torch.no_grad():
        guide.loc.copy_(conjugate.mean(eta))
        guide.scale = scale
        guide.factor.copy_(factor / scale[:, None])
    particles = exact_expectations(8)
    elbo = TemperedTraceMeanField_ELBO(temperature=eta, num_particles=particles)
    value = elbo(conjugate.model, guide)(conjugate.x, conjugate.y)
    parameters = [guide.loc, guide.scale_unconstrained, guide.factor]
    gradients = torch.autograd.grad(value, parameters)
    for gradient in gradients:
        torch.testing.assert_close(gradient, torch.zeros_like(gradient))
    if eta == 1.0:
        noise = 0.25 * torch.eye(8, dtype=D) + 4.0 * conjugate.design @ conjugate.design.T
        evidence = MultivariateNormal(torch.zeros(8, dtype=D), noise).log_prob(conjugate.y)
        torch.testing.assert_close(value, -evidence)

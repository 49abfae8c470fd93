"""Matrix normals for weight matrices, independent Normals for the rest."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.conjugate import Conjugate
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.elbo import TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.elbo.draw import SiteDraw
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides import AutoMatrixNormal
from pyro_bdl.program import record

D = torch.float64


def program(prior=None):
    torch.manual_seed(2)
    net = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2)).double()
    noise = dist.HalfNormal(torch.ones((), dtype=D))
    model = models.Regression(bayesianize(net, prior), noise=noise)
    return model, torch.randn(4, 2, 5, dtype=D), torch.randn(4, 2, dtype=D)


@pytest.fixture
def made():
    """A guide whose factors are random, and the dense Gaussian that it is."""
    model, x, y = program()
    guide = AutoMatrixNormal(model).prototype(x, y)
    with torch.no_grad():
        for k in range(len(guide.matrices)):
            for side in ("row", "column"):
                size = len(getattr(guide, f"{side}_{k}"))
                lower = 0.1 * torch.randn(size, size, dtype=D).tril(-1)
                setattr(guide, f"{side}_{k}", lower + torch.diag(torch.rand(size, dtype=D) + 0.2))
        guide.scale = torch.rand(len(guide.scale), dtype=D) + 0.1
    blocks = []
    scales = iter(guide.scale.detach())
    for name, latent in guide.layout.latents.items():
        if name in guide.matrices:
            a, b = (f.detach() for f in guide.factors(name))
            blocks.append(torch.kron(a @ a.mT, b @ b.mT))
        else:
            blocks += [next(scales).square().reshape(1, 1) for _ in range(latent.size)]
    oracle = MultivariateNormal(guide.loc.detach(), torch.block_diag(*blocks))
    return guide, oracle, model, (x, y)


def test_which_latents_are_matrices(made):
    guide = made[0]
    assert guide.matrices == ("0.weight", "2.weight")
    assert [f.shape for f in guide.factors("0.weight")] == [(3, 3), (4, 4)]
    assert [f.shape for f in guide.factors("2.weight")] == [(2, 2), (12, 12)]
    assert guide.scale.shape == (3 + 2 + 1,)
    with pytest.raises(
        KeyError, match=r"'noise' is not a weight matrix; there are 0.weight, 2.weight"
    ):
        guide.factors("noise")


def test_the_guide_against_its_dense_gaussian(made):
    guide, oracle, _, _ = made
    vectors = guide.sample_vectors(6).detach()
    log_det = guide.layout.constrain(vectors)[1]
    torch.testing.assert_close(
        torch.vmap(guide.log_density)(vectors, log_det), oracle.log_prob(vectors) - log_det
    )
    entropy = guide.entropy(vectors[0], log_det[0])
    torch.testing.assert_close(entropy, oracle.entropy() + log_det[0])
    torch.testing.assert_close(guide.variances(), oracle.variance)
    level = guide.layout.unconstrain(guide.quantiles([0.8]))[0]
    expected = dist.Normal(oracle.mean, oracle.stddev).icdf(torch.tensor(0.8, dtype=D))
    torch.testing.assert_close(level, expected)


def test_the_sites_are_independent_of_each_other(made):
    """The sites' densities multiply to the joint density, and estimators accept independent
    sites."""
    guide, _, model, data = made
    vector = guide.sample_vectors(1)[0].detach()
    values, log_det = guide.layout.constrain(vector)
    parts = guide.site_distributions()
    total = sum(q.log_prob(values[name]).sum() for name, q in parts.items())
    torch.testing.assert_close(total, guide.log_density(vector, log_det))
    elbo = TemperedTraceMeanField_ELBO(estimator="local_reparameterization")
    with pytest.raises(UnsupportedProgramError, match=r"has MatrixNormal at site '0.weight'"):
        elbo.loss(model, guide, *data)


def test_the_kl_is_that_of_the_dense_gaussian(made):
    guide, oracle, _, _ = made
    model, x, y = program(priors.Normal(0.7))
    part = guide.layout.slices["noise"].start
    weights = MultivariateNormal(oracle.mean[:part], oracle.covariance_matrix[:part, :part])
    prior = MultivariateNormal(torch.zeros(part, dtype=D), 0.49 * torch.eye(part, dtype=D))
    noise = dist.LogNormal(oracle.mean[part], oracle.stddev[part])
    expected = kl_divergence(weights, prior) + kl_divergence(
        noise, dist.HalfNormal(torch.ones((), dtype=D))
    )
    vector = guide.sample_vectors(1)[0]
    values, log_det = guide.layout.constrain(vector)
    run = record(model, values, (x, y))
    torch.testing.assert_close(guide.kl(vector, log_det, run), expected)
    draw = SiteDraw(guide, (x, y), {})
    by_site = draw.kl(record(model, draw.latents, (x, y)))
    torch.testing.assert_close(by_site, expected)


def test_the_exact_optimum_of_a_conjugate_model(exact_expectations):
    """With one output row and a column factor the covariance is full: the optimum is exact."""
    torch.manual_seed(4)
    x, y = torch.randn(9, 3, dtype=D), torch.randn(9, dtype=D)
    net = nn.Linear(3, 1, bias=False).double()
    model = models.Regression(bayesianize(net, priors.Normal(1.5)), noise=0.4)
    exact = Conjugate(x, y, 0.4, 1.5)
    guide = AutoMatrixNormal(model).prototype(x, y)
    with torch.no_grad():
        guide.loc.copy_(exact.mean)
        guide.row_0 = torch.tensor([[2.0]], dtype=D)
        guide.column_0 = torch.linalg.cholesky(exact.covariance) / 2
    particles = exact_expectations(3)
    loss = TemperedTraceMeanField_ELBO(num_particles=particles)(model, guide)
    value = loss(x, y)
    evidence = MultivariateNormal(
        torch.zeros(9, dtype=D), 0.16 * torch.eye(9, dtype=D) + 2.25 * x @ x.T
    ).log_prob(y)
    torch.testing.assert_close(value, -evidence)
    value.backward()
    for name, parameter in guide.named_parameters():
        torch.testing.assert_close(parameter.grad, torch.zeros_like(parameter), msg=name)


def test_long_sides_are_diagonal():
    model, x, y = program()
    guide = AutoMatrixNormal(model, max_side=3).prototype(x, y)
    assert [f.shape for f in guide.factors("0.weight")] == [(3, 3), (4,)]
    assert [f.shape for f in guide.factors("2.weight")] == [(2, 2), (12,)]
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TemperedTrace_ELBO())
    before = guide.median()
    svi.step(x, y)
    assert not torch.equal(guide.median()["0.weight"], before["0.weight"])
    torch.testing.assert_close(
        guide.variances()[:12].std(), torch.zeros((), dtype=D), atol=1e-4, rtol=0
    )


def test_an_embedding_is_a_matrix_of_its_rows():
    net = nn.Sequential(nn.Embedding(2000, 3), nn.Linear(3, 1))
    model = models.Regression(bayesianize(net), noise=0.3)
    guide = AutoMatrixNormal(model).prototype(torch.arange(4), torch.zeros(4))
    assert [f.shape for f in guide.factors("0.weight")] == [(2000,), (3, 3)]

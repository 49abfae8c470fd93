"""The mean-field posterior is the Normal that it says it is."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.guides import AutoMeanField

D = torch.float64


def model():
    a = pyro.sample("a", dist.Normal(torch.zeros(2, dtype=D), 1.0).to_event(1))
    s = pyro.sample("s", dist.HalfNormal(torch.ones((), dtype=D)))
    p = pyro.sample("p", dist.Beta(torch.ones((), dtype=D), 2.0))
    pyro.sample("y", dist.Normal(a.sum() * p, s), obs=torch.zeros((), dtype=D))


@pytest.fixture
def guide():
    guide = AutoMeanField(model, init_scale=0.2).prototype()
    assert torch.allclose(guide.scale, torch.full((4,), 0.2, dtype=D))
    with torch.no_grad():
        guide.loc.copy_(torch.tensor([0.5, -1.0, 0.3, -0.2], dtype=D))
        guide.scale = torch.tensor([0.1, 0.4, 0.5, 0.3], dtype=D)
    return guide


def test_the_posterior_vector(guide):
    posterior = guide.get_posterior()
    assert posterior.event_shape == (4,)
    torch.testing.assert_close(posterior.mean, guide.loc)
    torch.testing.assert_close(posterior.stddev, guide.scale)
    fresh = AutoMeanField(model).get_posterior
    with pytest.raises(RuntimeError, match="prototype"):
        fresh()


def test_each_site_has_its_own_distribution(guide):
    sites = pyro.poutine.trace(guide).get_trace().nodes
    assert isinstance(sites["a"]["fn"].base_dist, dist.Normal)
    assert isinstance(sites["s"]["fn"], dist.LogNormal)
    assert isinstance(sites["p"]["fn"], dist.TransformedDistribution)
    torch.testing.assert_close(sites["s"]["fn"].loc, guide.loc[2])
    torch.testing.assert_close(sites["s"]["fn"].scale, guide.scale[2])


def test_median_and_quantiles_by_scipy(guide):
    levels = [0.05, 0.5, 0.8]
    quantiles = guide.quantiles(levels)
    loc, scale = guide.loc.detach().numpy(), guide.scale.detach().numpy()
    u = torch.as_tensor(stats.norm(loc, scale).ppf([[q] for q in levels]))
    torch.testing.assert_close(quantiles["a"], u[:, :2])
    torch.testing.assert_close(quantiles["s"], u[:, 2].exp())
    torch.testing.assert_close(quantiles["p"], u[:, 3].sigmoid())
    median = guide.median()
    torch.testing.assert_close(median["s"], torch.tensor(0.3, dtype=D).exp())
    torch.testing.assert_close(median["a"], guide.loc.detach()[:2])


def test_draws_have_the_right_distribution(guide):
    draws = guide.sample_latents(3000)
    loc, scale = guide.loc.detach().numpy(), guide.scale.detach().numpy()
    unconstrained = {
        0: draws["a"][:, 0],
        1: draws["a"][:, 1],
        2: draws["s"].log(),
        3: draws["p"].logit(),
    }
    values = torch.stack(list(unconstrained.values()), 1).detach()
    for i in range(4):
        assert stats.kstest(values[:, i].numpy(), stats.norm(loc[i], scale[i]).cdf).pvalue > 1e-3
    correlation = torch.corrcoef(values.T) - torch.eye(4, dtype=D)
    assert correlation.abs().max() < 0.08
    draws["s"].sum().backward()
    assert guide.scale_unconstrained.grad[2] != 0  # reparameterised


def test_entropy_is_that_of_the_latents(guide):
    vectors = guide.sample_vectors(2000)
    log_det = guide.layout.constrain(vectors)[1]
    expected = -torch.vmap(guide.log_density)(vectors, log_det)
    values = torch.vmap(guide.entropy)(vectors, log_det)
    error = (values - expected).std() / 2000**0.5
    assert (values - expected).mean().abs() < 4 * error
    exact = dist.Normal(guide.loc, guide.scale).entropy().sum()
    torch.testing.assert_close(values - log_det, exact.expand(2000))


def test_the_exact_optimum_of_a_conjugate_model(conjugate):
    """Unbiased noise and closed-form KL: the mean of the gradient at the optimum is zero."""
    guide = conjugate.mean_field(AutoMeanField(conjugate.model))
    loss = TemperedTraceMeanField_ELBO(num_particles=50)(conjugate.model, guide)
    parameters = [guide.loc, guide.scale_unconstrained]
    gradients = torch.stack(
        [
            torch.cat(torch.autograd.grad(loss(conjugate.x, conjugate.y), parameters))
            for _ in range(100)
        ]
    )
    error = gradients.std(0) / 10
    assert (gradients.mean(0).abs() < 4 * error).all()
    assert (error < 0.5).all()


def test_scale_stays_positive_under_large_steps(conjugate):
    guide = AutoMeanField(conjugate.model)
    svi = pyro.infer.SVI(
        conjugate.model, guide, pyro.optim.Adam({"lr": 5.0}), TemperedTraceMeanField_ELBO()
    )
    for _ in range(20):
        assert math.isfinite(svi.step(conjugate.x, conjugate.y))
    assert (guide.scale > 0).all()


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_bad_init_scale(bad):
    with pytest.raises(ValueError, match="init_scale must be"):
        AutoMeanField(model, init_scale=bad)

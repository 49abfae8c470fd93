"""Draws of guides and of ``Samples`` in one form, and their log densities."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal

from pyro_bdl import Program, Samples
from pyro_bdl.guides import AutoMAP, AutoMeanField
from pyro_bdl.guides.draws import as_posterior, log_densities, samples_of_program, to_samples

Y = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64)


def level(y=None):
    s = pyro.sample("s", dist.LogNormal(torch.zeros((), dtype=torch.float64), 0.5))
    with pyro.plate("data", 3):
        pyro.sample("y", dist.Normal(s, 1.0), obs=y)


def test_draws_of_a_guide_are_one_chain_and_samples_stay():
    made = to_samples(AutoMeanField(level).prototype(Y), 5, Y)
    assert made.latents["s"].shape == (1, 5)
    assert to_samples(made, 2, Y) is made
    with pytest.raises(TypeError, match="a posterior is a guide or Samples, got float"):
        as_posterior(3.0)


def test_auxiliary_sites_of_pyros_guides_are_left_out():
    guide = AutoMultivariateNormal(level)
    guide(Y)
    latents = Program(level, Y).latents
    drawn = to_samples(guide, 4, Y)
    assert len(drawn.latents) > 1
    assert list(samples_of_program(latents, guide, drawn).latents) == ["s"]
    more = Samples({**drawn.latents}, {}, {})
    with pytest.raises(ValueError, match="the posterior is of another program"):
        samples_of_program(latents, more, more)


def test_log_densities_are_over_the_unconstrained_latents():
    guide, program = AutoMeanField(level).prototype(Y), Program(level, Y)
    vectors = torch.tensor([[0.4], [-1.3]], dtype=torch.float64)
    log_p, log_q = log_densities(program, guide, vectors)
    u = vectors[:, 0]
    prior = dist.Normal(torch.zeros_like(u), 0.5).log_prob(u)
    likelihood = dist.Normal(u.exp()[:, None], 1.0).log_prob(Y).sum(-1)
    torch.testing.assert_close(log_p, prior + likelihood)
    q = dist.Normal(guide.loc[0], guide.scale[0])
    torch.testing.assert_close(log_q, q.log_prob(u))
    log_prior, _ = log_densities(program, guide, vectors, program.log_prior)
    torch.testing.assert_close(log_prior, prior)


def test_a_point_has_no_density():
    guide = AutoMAP(level).prototype(Y)
    vectors = torch.zeros(2, 1, dtype=torch.float64)
    assert log_densities(Program(level, Y), guide, vectors)[1] is None

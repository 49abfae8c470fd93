"""Guides under Pyro's vectorized particles: a separate draw for every particle."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import JitTrace_ELBO, Predictive, Trace_ELBO
from torch import Tensor

from pyro_bdl.guides import AutoEnsemble, AutoLowRank
from pyro_bdl.program import Program

pytestmark = pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
PARTICLES = 400


def _unconstrained(guide, values: dict[str, Tensor]) -> Tensor:
    """The vectors (S, P) of sites (S, ...) in which dimensions of size one may stand."""
    latents = guide.layout.latents
    return guide.layout.unconstrain(
        {name: values[name].reshape(-1, *latent.shape) for name, latent in latents.items()}
    )


def test_predictive_in_parallel_draws_from_the_guide(guide, linear):
    program, x, _ = linear
    if guide.program_model is not program:
        pytest.skip("Pyro looks for plates in the guide, and no latent of this program is in one")
    drawn = Predictive(program, guide=guide, num_samples=PARTICLES, parallel=True)(x)
    vectors, expected = _unconstrained(guide, drawn), guide.sample_vectors(20_000)
    torch.testing.assert_close(vectors.mean(0), expected.mean(0), atol=0.25, rtol=0)
    torch.testing.assert_close(vectors.std(0), expected.std(0), atol=0.02, rtol=0.2)
    assert drawn["y"].shape == (PARTICLES, 3)
    assert (drawn["y"].std(0) > 0).all()


def test_every_particle_carries_its_own_density(dense, linear):
    guide, (_, x, y) = dense, linear
    with pyro.plate("particles", 5, dim=-2):
        trace = poutine.trace(guide).get_trace(x, y)
    trace.compute_log_prob()
    sites = {name: trace.nodes[name] for name in guide.layout.latents}
    found = sum(
        site["log_prob"].expand(5, 3 if site["cond_indep_stack"][1:] else 1).sum(-1)
        for site in sites.values()
    )
    vectors = _unconstrained(guide, {name: site["value"] for name, site in sites.items()})
    log_dets = guide.layout.constrain(vectors)[1]
    assert len(vectors.unique(dim=0)) == 5
    expected = [guide.log_density(v, d) for v, d in zip(vectors, log_dets, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize(
    "guide", ["low rank", "full", "kron", "diag", "ekfac", "subset", "SWAG"], indirect=True
)
def test_the_bound_is_the_mean_over_the_particles(guide, linear):
    """Where all latents are one draw: others draw site by site, or member by member."""
    (_, x, y), program = linear, guide.program_model
    elbo = Trace_ELBO(num_particles=5, vectorize_particles=True, max_plate_nesting=1)
    torch.manual_seed(3)
    loss = elbo.loss(program, guide, x, y)
    joint = Program(program, x, y)
    torch.manual_seed(3)
    terms = [
        guide.log_density(u, joint.constrain(u)[1]) - joint.log_joint(joint.constrain(u)[0])
        for u in guide.sample_vectors(5)
    ]
    assert loss == pytest.approx(torch.stack(terms).mean().item(), rel=1e-10)


@pytest.mark.parametrize("vectorized", [pytest.param(False, marks=pytest.mark.slow), True])
def test_pyros_traced_bound_is_the_plain_one(guide, linear, vectorized):
    (_, x, y), program = linear, guide.program_model
    options = {"num_particles": 3, "vectorize_particles": vectorized, "max_plate_nesting": 1}
    losses = []
    for bound in (Trace_ELBO(**options), JitTrace_ELBO(**options, ignore_jit_warnings=True)):
        bound.loss(program, guide, x, y)
        torch.manual_seed(4)
        losses.append(bound.loss(program, guide, x, y))
    assert losses[1] == pytest.approx(losses[0], rel=1e-8)


@pytest.mark.parametrize("family", [AutoLowRank, AutoEnsemble])
def test_parameters_made_within_the_particles_plate(family, linear):
    program, x, y = linear
    guide = family(program)
    with pyro.plate("particles", 5, dim=-2):
        values = guide(x, y)
    assert guide.layout.size == 6
    assert values["w"].shape == (5, 1, 1, 2)
    assert values["shift"].shape == (5, 3)


def test_a_plate_in_the_place_of_the_sites_own_dimensions_is_refused(linear):
    _, x, y = linear

    def undeclared(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(2), 1.0))
        pyro.sample("y", dist.Normal((x @ w).sum(), 1.0), obs=None if y is None else y[0])

    guide = AutoLowRank(undeclared).prototype(x, y)
    with pyro.plate("particles", 5, dim=-1), pytest.raises(ValueError, match=r"'w'.*to_event"):
        guide(x, y)

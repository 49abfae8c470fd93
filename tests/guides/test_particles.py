"""Guides under Pyro's vectorized particles: a draw of its own for every particle."""

import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive, Trace_ELBO
from torch import Tensor

from pyro_bdl.guides import (
    AutoEnsemble,
    AutoLaplaceGGN,
    AutoLastLayer,
    AutoLowRank,
    AutoMatrixNormal,
    AutoMCDropout,
    AutoMeanField,
    AutoSubnetwork,
    AutoSWAG,
    MixtureGuide,
)
from pyro_bdl.guides.subnetwork import SubsetNormal
from pyro_bdl.program import Program
from pyro_bdl.program.subset import Subset

pytestmark = pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
X = torch.tensor([[0.2, -1.0], [1.0, 0.5], [-0.3, 0.8]], dtype=torch.float64)
Y = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64)
PARTICLES = 400


def program(x, y=None):
    """A linear model whose statements broadcast over dimensions to their left."""
    w = pyro.sample("w", dist.Normal(x.new_zeros(1, 2), 1.0).to_event(2))
    s = pyro.sample("s", dist.LogNormal(x.new_zeros(()), 0.5))
    with pyro.plate("data", len(x)):
        shift = pyro.sample("shift", dist.Normal(x.new_zeros(()), 1.0))
        weights = w.reshape(*w.shape[:-3], 1, 2)  # without the plate's dimension
        mean = (x @ weights.mT)[..., 0] + shift
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def _moved(guide):
    guide.prototype(X, Y)
    with torch.no_grad():
        guide.loc.add_(0.1)
    return guide


def _laplace(structure):
    return _moved(AutoLaplaceGGN(program, structure=structure)).laplace_approximation((X, Y))


def _swag():
    guide = AutoSWAG(program, rank=3).prototype(X, Y)
    for _ in range(5):
        with torch.no_grad():
            guide.loc.add_(0.3 * torch.randn_like(guide.loc))
        guide.collect()
    return guide.swag_approximation()


def _subset_normal():
    source = _moved(AutoSubnetwork(program))
    return SubsetNormal(source, Subset(source.layout), 0.3)


def _low_rank():
    guide = AutoLowRank(program, rank=2, init_scale=0.3).prototype(X, Y)
    with torch.no_grad():
        guide.factor.normal_()
    return guide


GUIDES = {
    "mean field": lambda: _moved(AutoMeanField(program, init_scale=0.3)),
    "matrix normal": lambda: _moved(AutoMatrixNormal(program, init_scale=0.3)),
    "low rank": _low_rank,
    "full": functools.partial(_laplace, "full"),
    "kron": functools.partial(_laplace, "kron"),
    "diag": functools.partial(_laplace, "diag"),
    "subset": _subset_normal,
    "SWAG": _swag,
    "mixture": lambda: MixtureGuide([_low_rank(), _laplace("full")], [0.3, 0.7]),
    "last layer": lambda: _moved(AutoLastLayer(program)).laplace_approximation((X, Y)),
    "ensemble": lambda: AutoEnsemble(program, size=4).prototype(X, Y),
    "dropout": lambda: _moved(AutoMCDropout(program, sites="all", p=0.3)),
}
DENSE = ["mean field", "matrix normal", "low rank", "full", "kron", "diag", "subset", "SWAG"]
DENSE.append("mixture")


@pytest.fixture(params=GUIDES)
def guide(request):
    return GUIDES[request.param]()


def _unconstrained(guide, values: dict[str, Tensor]) -> Tensor:
    """The vectors (S, P) of sites (S, ...) in which dimensions of size one may stand."""
    latents = guide.layout.latents
    return guide.layout.unconstrain(
        {name: values[name].reshape(-1, *latent.shape) for name, latent in latents.items()}
    )


def test_predictive_in_parallel_draws_from_the_guide(guide):
    drawn = Predictive(program, guide=guide, num_samples=PARTICLES, parallel=True)(X)
    vectors, expected = _unconstrained(guide, drawn), guide.sample_vectors(20_000)
    torch.testing.assert_close(vectors.mean(0), expected.mean(0), atol=0.25, rtol=0)
    torch.testing.assert_close(vectors.std(0), expected.std(0), atol=0.02, rtol=0.2)
    assert drawn["y"].shape == (PARTICLES, 3)
    assert (drawn["y"].std(0) > 0).all()


@pytest.mark.parametrize("name", DENSE)
def test_every_particle_carries_its_own_density(name):
    guide = GUIDES[name]()
    with pyro.plate("particles", 5, dim=-2):
        trace = poutine.trace(guide).get_trace(X, Y)
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


@pytest.mark.parametrize("name", [name for name in DENSE if not name.startswith("m")])
def test_the_bound_is_the_mean_over_the_particles(name):
    guide = GUIDES[name]()
    elbo = Trace_ELBO(num_particles=5, vectorize_particles=True, max_plate_nesting=1)
    torch.manual_seed(3)
    loss = elbo.loss(program, guide, X, Y)
    joint = Program(program, X, Y)
    torch.manual_seed(3)
    terms = [
        guide.log_density(u, joint.constrain(u)[1]) - joint.log_joint(joint.constrain(u)[0])
        for u in guide.sample_vectors(5)
    ]
    assert loss == pytest.approx(torch.stack(terms).mean().item(), rel=1e-10)


@pytest.mark.parametrize("kind", [AutoLowRank, AutoEnsemble])
def test_parameters_made_within_the_particles_plate(kind):
    guide = kind(program)
    with pyro.plate("particles", 5, dim=-2):
        values = guide(X, Y)
    assert guide.layout.size == 6
    assert values["w"].shape == (5, 1, 1, 2)
    assert values["shift"].shape == (5, 3)


def test_a_plate_in_the_place_of_the_sites_own_dimensions_is_refused():
    def undeclared(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(2), 1.0))
        pyro.sample("y", dist.Normal((x @ w).sum(), 1.0), obs=None if y is None else y[0])

    guide = AutoLowRank(undeclared).prototype(X, Y)
    with pyro.plate("particles", 5, dim=-1), pytest.raises(ValueError, match=r"'w'.*to_event"):
        guide(X, Y)

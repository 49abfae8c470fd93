"""The one registry of guides for the contract tests, and what several files share.

A new family is one line in ``TRAINED`` (a class that plain SVI trains) or in ``MADE`` (a guide that
is made from a trained one, or from others).
"""

import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_bdl.curvature import LowRank, Samples
from pyro_bdl.curvature.structures import STRUCTURES
from pyro_bdl.guides import (
    AutoEnsemble,
    AutoInducing,
    AutoLaplaceGGN,
    AutoLastLayer,
    AutoLowRank,
    AutoMAP,
    AutoMatrixNormal,
    AutoMCDropout,
    AutoMeanField,
    AutoMultiSWAG,
    AutoPathfinder,
    AutoSubnetwork,
    AutoSWAG,
    AutoVariationalLastLayer,
    MixtureGuide,
)
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.subnetwork import SubsetNormal
from pyro_bdl.program.subset import Subset

X = torch.tensor([[0.2, -1.0], [1.0, 0.5], [-0.3, 0.8]], dtype=torch.float64)
Y = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64)

TRAINED = [
    AutoMAP,
    AutoMeanField,
    AutoLowRank,
    AutoMatrixNormal,
    AutoLaplaceGGN,
    AutoLastLayer,
    AutoSubnetwork,
    AutoSWAG,
    AutoMCDropout,
    AutoVariationalLastLayer,
    AutoInducing,
]


def program(x, y=None, *, local=True):
    """A linear model whose statements broadcast over dimensions to their left, with a shift for
    each datum or one for all."""
    w = pyro.sample("w", dist.Normal(x.new_zeros(1, 2), 1.0).to_event(2))
    s = pyro.sample("s", dist.LogNormal(x.new_zeros(()), 0.5))
    prior = dist.Normal(x.new_zeros(()), 1.0)
    shift = None if local else pyro.sample("shift", prior)
    with pyro.plate("data", len(x)):
        shift = pyro.sample("shift", prior) if local else shift
        weights = w.reshape(*w.shape[:-3], 1, 2)  # without the plate's dimension
        mean = (x @ weights.mT)[..., 0] + shift
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def one_shift(x, y=None):
    """The program with one shift for all data."""
    program(x, y, local=False)


def _moved(guide):
    guide.prototype(X, Y)
    with torch.no_grad():
        guide.loc.add_(0.1)
    return guide


def _laplace(structure):
    chosen = {"low_rank": LowRank(3), "samples": Samples(1000)}.get(structure, structure)
    # Kronecker factors take one datum at a time, and no latent of single data
    kind = one_shift if STRUCTURES[structure].curvature.takes_single_rows else program
    guide = _moved(AutoLaplaceGGN(kind, structure=chosen))
    return guide.laplace_approximation((X, Y))


def _swag():
    guide = AutoSWAG(program, rank=3).prototype(X, Y)
    for _ in range(5):
        with torch.no_grad():
            guide.loc.add_(0.3 * torch.randn_like(guide.loc))
        guide.collect()
    return guide.swag_approximation()


class Radial(Guide):
    """A guide of a user's: u = loc + scale r e, with e uniform on the sphere and r half Normal
    (Farquhar et al. 2020). Its marginals are not Normal."""

    def create_parameters(self, start):
        self.loc = torch.nn.Parameter(start.clone())

    def sample_vectors(self, num_samples):
        like = {"dtype": self.loc.dtype, "device": self.loc.device}
        directions = torch.randn(num_samples, len(self.loc), **like)
        radii = torch.randn(num_samples, 1, **like).abs()
        return self.loc + 0.3 * radii * torch.nn.functional.normalize(directions, dim=1)

    def location(self):
        return self.loc

    def variances(self):
        return torch.full_like(self.loc, 0.3**2 / len(self.loc))

    def log_density(self, vector, log_det):
        offset, count = vector - self.loc, len(self.loc)
        radius = offset.norm()
        area = math.log(2) + count / 2 * math.log(math.pi) - math.lgamma(count / 2)
        half = dist.HalfNormal(0.3).log_prob(radius)
        return half - (count - 1) * radius.log() - area - log_det


def _subset_normal():
    source = _moved(AutoSubnetwork(program))
    return SubsetNormal(source, Subset(source.layout), 0.3)


def _low_rank():
    guide = AutoLowRank(program, rank=2, init_scale=0.3).prototype(X, Y)
    with torch.no_grad():
        guide.factor.normal_()
    return guide


MADE = {
    "mean field": lambda: _moved(AutoMeanField(program, init_scale=0.3)),
    "matrix normal": lambda: _moved(AutoMatrixNormal(program, init_scale=0.3)),
    "low rank": _low_rank,
    "pathfinder": lambda: AutoPathfinder(program).prototype(X, Y),
    **{name: functools.partial(_laplace, name) for name in STRUCTURES},
    "subset": _subset_normal,
    "subnetwork": lambda: _moved(AutoSubnetwork(program, size=3)).laplace_approximation((X, Y)),
    "SWAG": _swag,
    "mixture": lambda: MixtureGuide([_low_rank(), _laplace("full")], [0.3, 0.7]),
    "last layer": lambda: _moved(AutoLastLayer(program)).laplace_approximation((X, Y)),
    "variational last layer": lambda: _moved(AutoVariationalLastLayer(program, init_scale=0.3)),
    "variational last layer, mean field": lambda: _moved(
        AutoVariationalLastLayer(program, structure="matrix-normal", features="mean-field")
    ),
    "inducing": lambda: _moved(AutoInducing(one_shift)),
    "radial": lambda: Radial(program).prototype(X, Y),
    "MultiSWAG": lambda: AutoMultiSWAG(program, size=2).prototype(X, Y),
    "ensemble": lambda: AutoEnsemble(program, size=4).prototype(X, Y),
    "anchored": lambda: AutoEnsemble(program, size=4, anchored=True).prototype(X, Y),
    "dropout": lambda: _moved(AutoMCDropout(program, sites="all", p=0.3)),
}
# Guides with a density in all latents, joint over them or factorized
DENSE = ["pathfinder", "mean field", "matrix normal", "low rank", "subset", "SWAG", "mixture"]
DENSE += ["inducing", "variational last layer, mean field"]
DENSE += [name for name, kind in STRUCTURES.items() if not kind.curvature.is_sampled]


# Trained as the MAP is, by the same code: one of them says it for all in the default run.
AS_MAP = {AutoLastLayer, AutoSubnetwork}


# AutoInducing holds rows of the data, draws by runs of its whole program, which no pickle holds,
# and starts near the function of the network, not at its weights.
EXEMPT = (
    "test_it_keeps_few_rows_of_the_data[AutoInducing",
    "test_it_starts_from_the_network[AutoInducing",
    "test_pyros_initializations[AutoInducing-init_to_mean",
    "test_pyros_initializations[AutoInducing-init2",
    "test_inside_a_guide_list[AutoInducing",
    "test_copies_stand_alone[AutoInducing-pickle",
    "test_every_trained_class_comes_back[AutoInducing",
    "test_ready_guides_are_copied[inducing-pickle",
)


@pytest.fixture(autouse=True)
def _of_this_guide(request):
    if request.node.name.startswith(EXEMPT):
        pytest.skip("not of this guide")


@pytest.fixture(
    params=[
        pytest.param(kind, marks=pytest.mark.slow if kind in AS_MAP else ()) for kind in TRAINED
    ],
    ids=lambda kind: kind.__name__,
)
def kind(request):
    """The class of a guide that SVI trains."""
    return request.param


@functools.cache
def _made(name):
    return MADE[name]()


def _ready(name):
    """A ready guide, which all tests share and none changes."""
    guide = _made(name)
    pyro.set_rng_seed(0)  # the test draws alike, whether it made the guide or not
    return guide


@pytest.fixture(params=MADE)
def guide(request):
    """A ready guide of the ``linear`` program."""
    return _ready(request.param)


@pytest.fixture(params=DENSE)
def dense(request):
    """A ready guide of the ``linear`` program that has a density."""
    return _ready(request.param)


@pytest.fixture
def linear():
    """The program of the ready guides, and its data."""
    return program, X, Y

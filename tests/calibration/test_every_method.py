"""Simulation-based calibration of every guide and kernel, where its family holds the posterior.

Ranks of the truth among L draws are uniform (Talts et al. 2018). They are judged by the
simultaneous band of their ECDF (Säilynoja et al. 2022), at an error of 0.01 over all methods and
quantities.
"""

from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.conjugate import Conjugate
from scipy.stats import binom

import pyro_bdl as bdl
from pyro_bdl.calibration import simulation_based_calibration
from pyro_bdl.curvature.structures import STRUCTURES
from pyro_bdl.guides import AutoLaplaceGGN
from pyro_bdl.guides.base import Guide
from pyro_bdl.mcmc.kernels import KERNELS
from pyro_bdl.mcmc.stochastic_gradient.kernels import StochasticKernel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double")]
SIMULATIONS, DRAWS = 200, 19
ORTHOGONAL = torch.eye(2, dtype=torch.float64).repeat(3, 1)
CORRELATED = ORTHOGONAL @ torch.tensor([[1.0, 0.8], [0.0, 0.6]], dtype=torch.float64)


def p_value(ranks, num_draws):
    """The probability that uniform ranks leave the band that these ranks just touch.

    At each z the ECDF of N uniform ranks is Binomial(N, z) / N, and a Markov chain in z: the band
    holds its tails at each z to one probability, the smallest of these ranks.
    """
    n, z = len(ranks), (np.arange(num_draws) + 1.0) / (num_draws + 1)
    counts = (np.asarray(ranks)[:, None] <= np.arange(num_draws)).sum(0)
    tail = min(binom.cdf(counts, n, z).min(), binom.sf(counts - 1, n, z).min()) * (1 + 1e-9)
    every, inside, before = np.arange(n + 1), np.eye(n + 1)[0], 0.0
    for place in z:
        share = (place - before) / (1 - before)
        inside = inside @ binom.pmf(every - every[:, None], n - every[:, None], share)
        inside[(binom.cdf(every, n, place) <= tail) | (binom.sf(every - 1, n, place) <= tail)] = 0
        before = place
    return 1 - inside.sum()


def mode(model, x, y):
    return Conjugate(x, y, 0.5).mean


def laplace(kind, model, x, y, **options):
    guide = kind(model, **options).prototype(x, y)
    with torch.no_grad():
        guide.loc.copy_(mode(model, x, y))
    return guide.laplace_approximation((x, y))


def pathfinder(model, x, y):
    return bdl.guides.AutoPathfinder(model).prototype(x, y)


# Name -> inputs, and a guide to be trained or a function (model, x, y) -> posterior
EXACT = {
    "AutoMeanField": (ORTHOGONAL, bdl.guides.AutoMeanField),
    "AutoLowRank": (CORRELATED, partial(bdl.guides.AutoLowRank, rank=2)),
    "AutoMatrixNormal": (CORRELATED, bdl.guides.AutoMatrixNormal),
    "AutoVariationalLastLayer": (CORRELATED, bdl.guides.AutoVariationalLastLayer),
    "AutoPathfinder": (CORRELATED, lambda model: pathfinder),
    "AutoLastLayer": (CORRELATED, lambda model: partial(laplace, bdl.guides.AutoLastLayer)),
    "AutoSubnetwork": (
        CORRELATED, lambda model: partial(laplace, bdl.guides.AutoSubnetwork, size=2),
    ),
    **{
        f"AutoLaplaceGGN, {name}": (
            ORTHOGONAL if name == "diag" else CORRELATED,
            lambda model, name=name: partial(laplace, AutoLaplaceGGN, structure=name),
        )
        for name in STRUCTURES
    },
}  # fmt: skip
OTHERS = {
    "AutoMAP": "a point",
    "AutoMCDropout": "its law of masks holds no Normal",
    "AutoEnsemble": "a few points",
    "AutoMultiSWAG": "a mixture of what SWAG is",
    "AutoSWAG": "the law of a walk, not of the posterior",
    "AutoInducing": "its functions are those of inducing inputs",
    "MixtureGuide": "made of others",
    "LaplaceGuide": "the result of the others' method",
}
GUIDES = {
    n for n in bdl.guides.__all__ if n != "Guide" and issubclass(getattr(bdl.guides, n), Guide)
}
STEPS = {
    "sgld": {"step_size": 0.02},
    "psgld": {"step_size": 0.02},
    "sghmc": {"step_size": 0.2, "friction": 0.1},
    "sgnht": {"step_size": 0.05, "friction": 0.1},
    "smile": {"step_size": 0.3},
}
TESTS = 4 * len(EXACT) + len(KERNELS) + len(STEPS)


def test_every_method_is_here():
    assert {name.split(",")[0] for name in EXACT} | OTHERS.keys() == GUIDES
    assert {kind.name for kind in StochasticKernel.__subclasses__()} == STEPS.keys()


def combinations(draw):
    (w,) = (value.flatten(-2) for value in draw.values())
    return {"a": w[..., 0], "b": w[..., 1], "sum": w.sum(-1), "difference": w[..., 0] - w[..., 1]}


def calibrated(name, x, inference):
    model = bdl.models.Regression(
        bdl.bayesianize(torch.nn.Linear(2, 1, bias=False).double()), noise=0.5
    )
    inference = inference(model)
    training = isinstance(inference, Guide) and {"steps": 800, "learning_rate": 0.05}
    found = simulation_based_calibration(
        model, inference, x, x.new_zeros(len(x)), num_simulations=SIMULATIONS, num_draws=DRAWS,
        quantities=combinations, progress=False, **(training or {}),
    )  # fmt: skip
    return [p_value(ranks, DRAWS) for ranks in found.ranks.T.tolist()]


@pytest.mark.filterwarnings("ignore:the guides' losses")
@pytest.mark.parametrize("name", EXACT)
def test_guides(name):
    assert min(calibrated(name, *EXACT[name])) * TESTS > 0.01


@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")
@pytest.mark.parametrize("name", ["AutoMeanField", "AutoLaplaceGGN, diag"])
def test_a_family_without_correlations_is_seen(name):
    assert min(calibrated(name, CORRELATED, EXACT[name][1])) * TESTS < 0.01


def bits(y=None):
    """As many problems of one latent as simulations, in one program: w ~ N(0, 1), and five bits of
    Bernoulli(sigmoid w)."""
    w = pyro.sample("w", dist.Normal(torch.zeros(SIMULATIONS), 1.0).to_event(1))
    with pyro.plate("data", 5):
        pyro.sample("y", dist.Bernoulli(logits=w.expand(5, -1)).to_event(1), obs=y)


@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")  # of chains of one draw
@pytest.mark.parametrize("name", [*KERNELS, *STEPS])
def test_kernels(name):
    """One draw of each of L independent chains."""
    true = torch.randn(SIMULATIONS)
    y = torch.bernoulli(true.sigmoid().expand(5, -1))
    options = {"num_chains": DRAWS, "num_samples": 1, "seed": 1, "progress": False}
    if name in KERNELS:
        samples = bdl.mcmc.sample(bits, y, kernel=name, num_warmup=300, **options)
    else:
        kind = next(kind for kind in StochasticKernel.__subclasses__() if kind.name == name)
        samples = bdl.mcmc.sgmcmc(bits, (y,), kernel=kind(**STEPS[name]), num_warmup=600, **options)
    ranks = (samples.latents["w"][:, 0] < true).sum(0)
    assert p_value(ranks.tolist(), DRAWS) * TESTS > 0.01


@pytest.mark.parametrize("factor, shift", [(1.0, 0.0), (0.7, 0.0), (1.0, 0.5)])
def test_the_band(factor, shift):
    """Its p-values are uniform where the draws have the law of the truth, and small elsewhere."""
    rng = np.random.default_rng(0)
    draws = shift + factor * rng.standard_normal((60, 100, DRAWS))
    ranks = (draws < rng.standard_normal((60, 100, 1))).sum(-1)
    p_values = np.array([p_value(one, DRAWS) for one in ranks])
    share = (p_values < 0.1).mean()  # its standard error is 0.04
    assert share < 0.25 if (factor, shift) == (1.0, 0.0) else share > 0.3

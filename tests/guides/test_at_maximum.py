"""What a Newton step would gain, and when it is said."""

import copy
import re
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.conjugate import Conjugate
from torch import nn

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.curvature.structures import STRUCTURES
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import AutoLaplaceGGN
from pyro_bdl.guides.mode import log_joint

D = torch.float64
P = 12
LIMIT = 1.0 + 0.1 * P


def collinear():
    """A linear regression whose inputs are nearly the same, so that its weights are correlated."""
    torch.manual_seed(2)
    x = torch.randn(60, 1, dtype=D) + 0.03 * torch.randn(60, P, dtype=D)
    y = x.sum(1) / P + 0.5 * torch.randn(60, dtype=D)
    return x, y


def program(x, y, prior):
    """The program, and its precision and mode in closed form."""
    network = nn.Linear(P, 1, bias=False, dtype=D)
    model = models.Regression(bayesianize(network, priors.Normal(prior)), noise=0.5)
    exact = Conjugate(x, y, 0.5, prior)
    return model, exact.precision, exact.mean


def said(model, start, structure, *, first=60, shift=0.0):
    """The gain that the warning names, or None, from weights ``start``; the rows after the first
    ones come by ``update``, whose warning it is then, with targets that are higher by a shift."""
    x, y = collinear()
    y[first:] += shift
    guide = AutoLaplaceGGN(model, structure=structure).prototype(x, y)
    with torch.no_grad():
        guide.loc.copy_(start)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BdlWarning)
        posterior = guide.laplace_approximation((x[:first], y[:first]))
        if first < len(x):
            assert not caught
            posterior.update((x[first:], y[first:]))
    assert all(w.filename == __file__ for w in caught)
    told = [str(w.message) for w in caught if "not at a maximum" in str(w.message)]
    assert len(told) <= 1
    return float(re.search(r"would gain ([\d.e+]+) nats", told[0]).group(1)) if told else None


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_gain_is_that_of_the_step(structure):
    """Under a flat prior, of a quadratic density: log p(mode) - log p(start) = d'H d / 2 by the
    exact step d, and (g'd)^2 / (2 d'H d) by the step C g of another structure."""
    x, y = collinear()
    model, precision, mode = program(x, y, prior=1e4)
    torch.manual_seed(0)
    start = mode + 0.5 * torch.randn(P, dtype=D)
    offset = mode - start
    possible = (0.5 * offset @ precision @ offset).item()
    found = said(model, start, structure)
    assert found == pytest.approx(possible, rel=6e-3) if structure in ("full", "kernel") else True
    assert LIMIT < found <= 1.006 * possible


@pytest.mark.parametrize("structure", ["full", "kernel"])
def test_more_data_have_another_maximum(structure):
    """The mode of the first rows is none of all: log p(mode) - log p(there), under a flat prior."""
    x, y = collinear()
    y[40:] += 1.0
    model, precision, mode = program(x, y, prior=1e4)
    first = Conjugate(x[:40], y[:40], 0.5, 1e4).mean
    offset = mode - first
    possible = (0.5 * offset @ precision @ offset).item()
    found = said(model, first, structure, first=40, shift=1.0)
    assert found == pytest.approx(possible, rel=6e-3)


@pytest.mark.parametrize("share", [0.9, 1.1])
@pytest.mark.parametrize("direction", range(3))
@pytest.mark.parametrize("structure", STRUCTURES)
def test_nothing_is_said_below_the_limit(structure, direction, share):
    """The sum of C_ii g_i^2 is up to a thousand times the gain here, and a diagonal step goes too
    far: the true gain decides, along the stiffest direction, the softest, and another."""
    x, y = collinear()
    model, precision, mode = program(x, y, prior=1e4)
    vectors = torch.linalg.eigh(precision)[1]
    offset = {0: vectors[:, -1], 1: vectors[:, 0], 2: torch.ones(P, dtype=D)}[direction]
    offset = offset * (share * LIMIT / (0.5 * offset @ precision @ offset)).sqrt()
    found = said(model, mode + offset, structure)
    if share < 1:
        assert found is None
    elif structure in ("full", "kernel"):
        assert found == pytest.approx(share * LIMIT, rel=6e-3)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_another_scale_of_the_prior_explains_the_gradient(structure):
    """The optimum under weight decay of another strength: a step gains thousands of nats under
    this prior, and nothing under that one."""
    x, y = collinear()
    model, precision, _ = program(x, y, prior=0.01)
    start = Conjugate(x, y, 0.5, 0.5).mean
    gradient = x.T @ (y - x @ start) / 0.25 - start / 0.01**2
    assert 0.5 * gradient @ torch.linalg.solve(precision, gradient) > 100 * LIMIT
    assert said(model, start, structure) is None


@pytest.fixture(scope="module")
def without_weight_decay():
    """A network at the maximum of its likelihood, and the data."""
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 100, dtype=D)[:, None]
    y = torch.sin(2 * x[:, 0]) + 0.3 * torch.randn(100, dtype=D)
    network = nn.Sequential(nn.Linear(1, 8, dtype=D), nn.Tanh(), nn.Linear(8, 1, dtype=D))
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=600, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = (network(x)[:, 0] - y).square().sum() / 0.18
        value.backward()
        return value

    optimizer.step(loss)
    return network, x, y


@pytest.mark.parametrize("precision", [2.0, 0.1])
def test_a_trained_network_without_weight_decay(without_weight_decay, precision):
    """Its gradient is that of the prior alone, which the scale 0 explains. The sum of C_ii g_i^2
    is hundreds of nats; g' C g / 2 at that scale is below the limit."""
    network, x, y = without_weight_decay
    prior = priors.Normal(precision**-0.5)
    guide = AutoLaplaceGGN(
        models.Regression(bayesianize(copy.deepcopy(network), prior), noise=0.3), structure="full"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", BdlWarning)
        guide.laplace_approximation((x, y))


def test_a_factor_of_the_latents_counts_once_in_the_density():
    """log p(y, u) over two batches is that over one: the factor is in no plate of the data."""
    torch.manual_seed(0)
    x, y = torch.randn(8, dtype=D), torch.randn(8, dtype=D)

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=D), 2.0))
        pyro.factor("shift", 3.0 * w)
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(w * x, 0.5), obs=y)

    likelihood = dist.Normal(x * 0.7, torch.tensor(0.5, dtype=D)).log_prob(y).sum() + 3.0 * 0.7
    prior = dist.Normal(0.0, torch.tensor(2.0, dtype=D)).log_prob(torch.tensor(0.7))
    for data in [(x, y)], [(x[:3], y[:3]), (x[3:], y[3:])]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BdlWarning)
            guide = AutoLaplaceGGN(model, structure="full").laplace_approximation(data)
        found = log_joint(guide, torch.tensor([0.7], dtype=D))
        assert found == pytest.approx((float(likelihood), float(prior)))

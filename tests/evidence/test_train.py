"""Hyperparameters while the MAP is trained: when, how far, and what is kept."""

import warnings

import pytest
import torch
from torch import nn

from pyro_bdl import bayesianize, evidence, models, priors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.evidence import train_by_evidence
from pyro_bdl.guides import AutoLaplaceGGN

# around points that nobody trained
pytestmark = pytest.mark.filterwarnings("ignore:.*#not-at-a-maximum")


def map_guide(line, **options):
    return AutoLaplaceGGN(line.model, **{"structure": "full", **options}).prototype(*line.data)


def test_training_by_evidence_reaches_the_maximum(line):
    best, prior, noise = line.best()
    guide = AutoLaplaceGGN(line.model, structure="full")
    posterior, interrupted = train_by_evidence(
        line.model, guide, *line.data, steps=150, rounds=8, between=30
    )
    assert not interrupted
    found = evidence.log_marginal_likelihood(posterior).item()
    assert found == pytest.approx(best, abs=0.02)
    now = [value.item() for value in posterior.hyperparameters().values()]
    assert now == pytest.approx([prior.item(), noise.item()], rel=0.05)


def test_a_subset_is_tuned_at_the_end(line, values):
    guide = AutoLaplaceGGN(line.model, structure="full", subset="last-layer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        posterior, _ = train_by_evidence(line.model, guide, *line.data, steps=200, rounds=4)
    before = evidence.log_marginal_likelihood(posterior, linearized=True)
    assert evidence.maximize(posterior).log_evidence == pytest.approx(before.item(), abs=1e-4)
    assert values(posterior)["noise"].item() != pytest.approx(line.noise)


@pytest.mark.parametrize("linearized, vanishes", [(True, True), (False, False)])
def test_a_scale_for_each_layer_is_told_where_it_vanishes(learn, values, linearized, vanishes):
    """The linearized model fits a sine with the last layer alone; at the trained weights the first
    layer's scale is that of its weights."""
    x = torch.linspace(-2, 2, 60)[:, None]
    y = (3 * x).sin().squeeze() + 0.1 * torch.randn(60)
    net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    model = models.Regression(
        bayesianize(net, priors.PerLayer(priors.Normal(learn(1.0)))), noise=0.2
    )
    guide = AutoLaplaceGGN(model, structure="kron")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", BdlWarning)
        posterior, _ = train_by_evidence(
            model, guide, x, y, steps=300, rounds=2, linearized=linearized
        )
    assert any("towards 0" in str(one.message) for one in told) == vanishes
    first = values(posterior)["hyper_0_prior_scale"]
    assert (first < 1e-3) if vanishes else (first > 0.3)


def test_without_hyperparameters_it_is_a_map(line):
    model = models.Regression(bayesianize(nn.Linear(3, 1), priors.Normal(0.7)), noise=0.5)
    guide = AutoLaplaceGGN(model, structure="full")
    guide.prototype(*line.data)
    with torch.no_grad():
        guide.loc.copy_(line.mode() + 0.1)
    posterior, _ = train_by_evidence(model, guide, *line.data, steps=200)
    torch.testing.assert_close(posterior.loc, line.mode(), rtol=1e-2, atol=1e-2)
    assert posterior.hyperparameters() == {}


def test_heavy_tails_and_weights_without_a_prior(line, learn):
    """No closed form for the scale, and a bias that the optimizer of the MAP learns."""
    prior = priors.ByName({"weight": priors.StudentT(4.0, learn(1.0))})
    model = models.Regression(bayesianize(nn.Linear(3, 1), prior), noise=0.5)
    bias = dict(model.named_parameters())["network.network.bias"]
    before = bias.detach().clone()
    guide = AutoLaplaceGGN(model, structure="full")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        posterior, _ = train_by_evidence(
            model, guide, *line.data, steps=20, rounds=2, linearized=False
        )
    assert not torch.equal(bias, before)
    (value,) = posterior.hyperparameters().values()
    assert value.item() != pytest.approx(1.0)

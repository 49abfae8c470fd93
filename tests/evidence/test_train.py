"""Hyperparameters while the MAP is trained: when, how far, and what is kept."""

import warnings

import pytest
import torch
from torch import nn

from pyro_bdl import bayesianize, evidence, models, priors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.evidence import train_by_evidence
from pyro_bdl.guides import AutoLaplaceGGN


def map_guide(line, **options):
    return AutoLaplaceGGN(line.model, **{"structure": "full", **options}).prototype(*line.data)


def test_updates_within_a_loop_reach_the_maximum_of_the_exact_evidence(line, values):
    """With epochs that move the weights to the mode at the current hyperparameters (Immer et al.
    2021a, algorithm 1)."""
    best, prior, noise = line.best()
    guide = map_guide(line)
    for _ in range(40):
        posterior = guide.laplace_approximation(line.data)
        found = evidence.maximize(posterior, steps=10, linearized=False)
        with torch.no_grad():
            guide.loc.copy_(line.mode(*posterior.hyperparameters().values()))
    assert found.log_evidence == pytest.approx(best, abs=1e-4)
    now = values(posterior)
    assert now["hyper_prior_scale"].item() == pytest.approx(prior.item(), rel=0.05)
    assert now["noise"].item() == pytest.approx(noise.item(), rel=0.05)


def test_training_by_evidence_reaches_the_maximum(line):
    best, prior, noise = line.best()
    guide = AutoLaplaceGGN(line.model, structure="full")
    posterior, interrupted = train_by_evidence(
        line.model, guide, *line.data, steps=400, rounds=20, between=30
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
        posterior, _ = train_by_evidence(model, guide, *line.data, steps=20, rounds=2)
    assert not torch.equal(bias, before)
    (value,) = posterior.hyperparameters().values()
    assert value.item() != pytest.approx(1.0)

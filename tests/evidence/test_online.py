"""Hyperparameters while the MAP is trained: when, how far, and what is kept."""

import warnings

import pyro
import pytest
import torch
from torch import nn

from pyro_bdl import bayesianize, evidence, models, priors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.evidence import Evidence, MarginalLikelihoodTraining, train_by_evidence
from pyro_bdl.guides import AutoLaplaceGGN


def map_guide(line, **options):
    return AutoLaplaceGGN(line.model, **{"structure": "full", **options}).prototype(*line.data)


@pytest.mark.parametrize(
    ("method", "linearized"),
    [
        ("mackay", True),
        ("gradient", False),
        pytest.param("mackay", False, marks=pytest.mark.slow),
    ],
)
def test_it_reaches_the_maximum_of_the_exact_evidence(line, method, linearized, values):
    """With epochs that move the weights to the mode at the current hyperparameters. Source: Immer
    et al. 2021a, algorithm 1."""
    best, prior, noise = line.best()
    guide = map_guide(line)
    online = MarginalLikelihoodTraining(
        guide, line.data, every=1, burn_in=0, method=method, steps=20, linearized=linearized
    )
    for _ in range(60):
        with torch.no_grad():
            now = values(online._laplace())
            guide.loc.copy_(line.mode(now["hyper_prior_scale"], now["noise"]))
        if not online.step():
            break
    posterior = online.finish()
    slack = 1e-4 if method == "mackay" else 5e-3  # steps of Adam do not come to rest
    assert online.best.log_evidence == pytest.approx(best, abs=slack)
    assert evidence.log_marginal_likelihood(posterior).item() == pytest.approx(best, abs=slack)
    now = values(posterior)
    assert now["hyper_prior_scale"].item() == pytest.approx(prior.item(), rel=0.05)
    assert now["noise"].item() == pytest.approx(noise.item(), rel=0.05)


@pytest.mark.slow
def test_in_a_loop_of_svi(line):
    """A real loop, whose optimizer trains only the guide's parameters."""
    best, *_ = line.best()
    guide = map_guide(line)
    optimizer = torch.optim.Adam(guide.parameters(), lr=0.05)
    elbo = pyro.infer.Trace_ELBO()
    data = [(line.x[:5], line.y[:5]), (line.x[5:], line.y[5:])]
    online = MarginalLikelihoodTraining(guide, data, every=10, burn_in=100, structure="full")
    for _ in range(400):
        loss = elbo.differentiable_loss(line.model, guide, *line.data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not online.step():
            break
    assert online.best.log_evidence == pytest.approx(best, abs=0.05)
    online.finish()


def scripted(monkeypatch, guide, data, evidences, **options):
    """An object whose updates find the given evidences, at other hyperparameters each."""
    online = MarginalLikelihoodTraining(guide, data, **options)
    names = list(online._laplace()._read().parameters)
    made = []

    def update():
        number = len(made)
        made.append(online.epoch)
        for parameter in online._laplace()._read().parameters.values():
            parameter.set(torch.tensor(1.0 + number))
        return Evidence(evidences[number], 1.0, dict.fromkeys(names, torch.tensor(1.0 + number)))

    monkeypatch.setattr(online, "_update", update)
    return online, made


@pytest.mark.parametrize(
    ("every", "burn_in", "epochs"),
    [(1, 0, [1, 2, 3, 4, 5, 6]), (2, 0, [1, 3, 5]), (3, 2, [3, 6]), (5, 6, [])],
)
def test_updates_come_when_they_are_due(line, monkeypatch, every, burn_in, epochs):
    guide = map_guide(line)
    online, made = scripted(monkeypatch, guide, line.data, range(9), every=every, burn_in=burn_in)
    assert all(online.step() for _ in range(6))
    assert made == epochs == [epoch for epoch, _ in online.history]


def test_it_stops_and_goes_back_to_the_best(line, monkeypatch, values):
    guide = map_guide(line)
    online, _ = scripted(
        monkeypatch, guide, line.data, [1.0, 3.0, 2.0, 2.5, 0.0], every=1, burn_in=0, patience=2,
        linearized=False,
    )  # fmt: skip
    going = []
    for epoch in range(4):
        with torch.no_grad():
            guide.loc.fill_(float(epoch))
        going.append(online.step())
    assert going == [True, True, True, False]
    posterior = online.finish()
    assert online.best.log_evidence == 3.0
    assert (guide.loc == 1.0).all() and (posterior.loc == 1.0).all()
    assert all(value.item() == pytest.approx(2.0) for value in values(posterior).values())
    precision = line.precision(2.0, 2.0)
    torch.testing.assert_close(posterior.precision.logdet(), precision.logdet())


def test_it_ends_at_the_optimum_of_the_linearized_model(line, values):
    """Updates are at the weights; the hyperparameters at the end are not."""
    best, prior, noise = line.best()
    guide = map_guide(line)
    online = MarginalLikelihoodTraining(guide, line.data, every=1, burn_in=0, steps=1)
    online.step()
    assert online.best.at_optimum is None and online.final is None
    posterior = online.finish()
    assert online.final.log_evidence == pytest.approx(best, abs=1e-5)
    assert online.final.at_weights.log_evidence < best - 0.1
    now = values(posterior)
    assert now["hyper_prior_scale"].item() == pytest.approx(prior.item(), rel=0.01)
    assert now["noise"].item() == pytest.approx(noise.item(), rel=0.01)


def test_without_patience_it_never_stops(line, monkeypatch):
    online, _ = scripted(
        monkeypatch, map_guide(line), line.data, [1.0] * 30, every=1, burn_in=0, patience=None
    )
    assert all(online.step() for _ in range(30))


def test_options_of_the_approximation(line):
    guide = map_guide(line, structure="kron")
    online = MarginalLikelihoodTraining(guide, line.data, structure="diag", subset="weight")
    posterior = online._laplace()
    assert posterior.config.structure == "diag" and posterior.subset.sites == ("weight",)
    again = MarginalLikelihoodTraining(guide, line.data)._laplace()
    assert again.config.structure == "kron" and again.subset.complete


def test_it_says_what_is_wrong(line):
    guide = map_guide(line)
    for name in ("every", "steps", "patience"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            MarginalLikelihoodTraining(guide, line.data, **{name: 0})
    with pytest.raises(ValueError, match="burn_in must not be negative, got -1"):
        MarginalLikelihoodTraining(guide, line.data, burn_in=-1)
    online = MarginalLikelihoodTraining(guide, line.data, burn_in=3)
    online.step()
    with pytest.raises(RuntimeError, match=r"no update has been made after 1 epochs .burn_in=3."):
        online.finish()
    with pytest.raises(ValueError, match="unknown structure 'round'"):
        MarginalLikelihoodTraining(guide, line.data, structure="round")


# Training from start to end


@pytest.mark.slow  # tests/test_posteriors.py has a case of it
def test_training_by_evidence_reaches_the_maximum(line):
    best, prior, noise = line.best()
    guide = AutoLaplaceGGN(line.model, structure="full")
    posterior, interrupted = train_by_evidence(line.model, guide, *line.data, steps=400, rounds=5)
    assert not interrupted
    found = evidence.log_marginal_likelihood(posterior).item()
    assert found == pytest.approx(best, abs=0.02)
    now = [value.item() for value in evidence.hyperparameters(posterior).values()]
    assert now == pytest.approx([prior.item(), noise.item()], rel=0.05)


def test_a_subset_is_tuned_at_the_end(line, values):
    guide = AutoLaplaceGGN(line.model, structure="full", subset="last-layer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        posterior, _ = train_by_evidence(line.model, guide, *line.data, steps=200, rounds=4)
    before = evidence.linearized_optimum(posterior)
    before = evidence.log_marginal_likelihood(posterior, offset=before)
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
    assert evidence.hyperparameters(posterior) == {}


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
    (value,) = evidence.hyperparameters(posterior).values()
    assert value.item() != pytest.approx(1.0)

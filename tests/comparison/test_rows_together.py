"""Scores of programs whose rows need each other."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl

D = {"dtype": torch.float64}
N, NOISE = 400, 0.5


def centered(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2, **D), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal((x - x.mean(0)) @ w, NOISE), obs=y)


def mixed(x, y=None):
    """As above, with a matrix of N columns: it does not run on fewer rows."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2, **D), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal((torch.eye(N, **D) - 1 / N) @ x @ w, NOISE), obs=y)


def test_scores_are_those_of_all_rows_at_once():
    torch.manual_seed(0)
    x = torch.randn(N, 2, **D).sort(0).values  # the mean of a part is another
    y = (x - x.mean(0)) @ torch.tensor([1.0, -0.5], **D) + NOISE * torch.randn(N, **D)
    w = torch.tensor([1.0, -0.5], **D) + 0.3 * torch.randn(4000, 2, **D)
    mean = (x - x.mean(0)) @ w.T
    density = dist.Normal(mean, NOISE).log_prob(y[:, None]).logsumexp(1) - math.log(4000)
    for model in (centered, mixed):
        draws = {"posterior": {"w": w}}
        comparison = bdl.compare(model, draws, x, y, reference=None, rows="together")
        assert comparison.table.loc["posterior", "nlpd"] == pytest.approx(-float(density.mean()))
    with pytest.raises(bdl.errors.UnsupportedProgramError, match='rows="together"'):
        bdl.compare(mixed, draws, x, y, reference=None)
    with pytest.raises(ValueError, match="rows is 'alone' or 'together'"):
        bdl.compare(mixed, draws, x, y, reference=None, rows="whole")


def test_a_posterior_says_it():
    torch.manual_seed(0)
    x, y = torch.randn(N, 2, **D), 0.1 * torch.randn(N, **D)
    guide = bdl.guides.AutoLaplaceGGN(mixed, structure="full", rows="together")
    bdl.training.train(mixed, guide, x, y, steps=300, learning_rate=0.05)
    found = bdl.evaluate(mixed, guide.laplace_approximation((x, y)), x, y, num_samples=4000)
    assert math.isfinite(found.scores["nlpd"])

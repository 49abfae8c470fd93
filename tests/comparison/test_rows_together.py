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


def test_scores_are_those_of_all_rows_at_once(monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(N, 2, **D).sort(0).values  # the mean of a part is another
    y = (x - x.mean(0)) @ torch.tensor([1.0, -0.5], **D) + NOISE * torch.randn(N, **D)
    w = torch.tensor([1.0, -0.5], **D) + 0.3 * torch.randn(4000, 2, **D)
    mean = (x - x.mean(0)) @ w.T
    density = dist.Normal(mean, NOISE).log_prob(y[:, None]).logsumexp(1) - math.log(4000)
    draws = {"posterior": {"w": w}}
    with pytest.raises(bdl.errors.UnsupportedProgramError, match='rows = "together"'):
        bdl.compare(mixed, draws, x, y, reference=None)
    for model in (centered, mixed):
        monkeypatch.setattr(model, "rows", "together", raising=False)
        comparison = bdl.compare(model, draws, x, y, reference=None)
        assert comparison.table.loc["posterior", "nlpd"] == pytest.approx(-float(density.mean()))
    monkeypatch.setattr(mixed, "rows", "whole")
    with pytest.raises(ValueError, match="rows of the program is 'alone' or 'together'"):
        bdl.compare(mixed, draws, x, y, reference=None)


@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")
def test_what_is_left_out_is_scored_beside_all_rows(monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(2 * N, 2, **D).sort(0).values
    y, w = torch.randn(2 * N, **D), torch.randn(4000, 2, **D)
    monkeypatch.setattr(centered, "rows", "together", raising=False)

    def density(rows):
        mean = (x[rows] - x[rows].mean(0)) @ w.T
        return dist.Normal(mean, NOISE).log_prob(y[rows, None])

    found = bdl.k_fold(lambda x, y: (centered, bdl.Samples({"w": w[None]})), x, y, folds=2)
    halves = [density(found.fold == k).logsumexp(1) - math.log(4000) for k in range(2)]
    torch.testing.assert_close(found.elpd, float(torch.cat(halves).sum()))
    samples, every = bdl.Samples({"w": w[None]}), density(slice(None))
    found = bdl.loo(centered, samples, x, y)
    expected = bdl.diagnostics.loo(every.T[None])
    torch.testing.assert_close(found.pointwise, expected.pointwise)


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize("by", ["posterior", "program"])
def test_a_posterior_or_its_program_says_it(by, monkeypatch):
    torch.manual_seed(0)
    x, y = torch.randn(N, 2, **D), 0.1 * torch.randn(N, **D)
    if by == "program":
        monkeypatch.setattr(mixed, "rows", "together", raising=False)
    options = {"rows": "together"} if by == "posterior" else {}
    guide = bdl.guides.AutoLaplaceGGN(mixed, structure="full", **options)
    bdl.training.train(mixed, guide, x, y, steps=10, learning_rate=0.05)
    found = bdl.evaluate(mixed, guide.laplace_approximation((x, y)), x, y, num_samples=4000)
    assert math.isfinite(found.scores["nlpd"])

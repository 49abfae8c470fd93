"""The grid on held-out data."""

import pyro.distributions as dist
import pytest
import torch

from pyro_bdl import LinearizedPredictive, bayesianize, models
from pyro_bdl.evidence import tune_on_validation

VALUES = (0.01, 0.1, 1.0, 10.0)


def held_out():
    torch.manual_seed(9)
    return torch.randn(6, 3), torch.randn(6)


def test_scores_are_those_of_fresh_posteriors(line, values):
    """The exact predictive density at every value of the prior's scale, the MAP held fixed."""
    x, y = held_out()
    guide = line.laplace()
    grid = tune_on_validation(guide, x, y, parameter="prior", values=VALUES)
    design = torch.cat([x, torch.ones(6, 1)], 1)
    expected = []
    for a in VALUES:
        inverse = torch.linalg.inv(line.precision(a))
        variance = torch.einsum("np,pq,nq->n", design, inverse, design) + line.noise**2
        expected.append(dist.Normal(design @ guide.loc, variance.sqrt()).log_prob(y).mean().item())
    assert grid.scores == pytest.approx(expected, rel=1e-9)
    assert grid.values == VALUES
    assert grid.best == VALUES[max(range(4), key=expected.__getitem__)] != VALUES[0]
    assert values(guide)["hyper_prior_scale"].item() == pytest.approx(grid.best)
    torch.testing.assert_close(guide.precision.logdet(), line.precision(grid.best).logdet())
    found = LinearizedPredictive(line.model, guide).log_density(x, y)["y"].mean()
    assert found.item() == pytest.approx(max(expected))


def test_the_noise_is_followed_too(line):
    x, y = held_out()
    guide = line.laplace()
    grid = tune_on_validation(guide, x, y, parameter="noise", values=VALUES)
    design = torch.cat([x, torch.ones(6, 1)], 1)
    expected = []
    for s in VALUES:
        inverse = torch.linalg.inv(line.precision(None, s))
        variance = torch.einsum("np,pq,nq->n", design, inverse, design) + s**2
        expected.append(dist.Normal(design @ guide.loc, variance.sqrt()).log_prob(y).mean().item())
    assert grid.scores == pytest.approx(expected, rel=1e-8)


def test_a_score_of_ones_own(line, values):
    guide = line.laplace()
    grid = tune_on_validation(
        guide,
        parameter="prior",
        values=VALUES,
        score=lambda posterior: -abs(values(posterior)["hyper_prior_scale"].item() - 0.1),
    )
    assert grid.best == 0.1 and grid.scores[1] == pytest.approx(0.0, abs=1e-12)
    scores = iter([float("nan"), 1.0, 2.0, float("nan")])
    grid = tune_on_validation(guide, parameter="prior", values=VALUES, score=lambda q: next(scores))
    assert grid.best == 1.0


def test_an_error_restores_everything(line, values):
    guide = line.laplace()
    logdet, calls = guide.precision.logdet(), []

    def failing(posterior):
        calls.append(values(posterior)["hyper_prior_scale"].item())
        if len(calls) == 3:
            raise RuntimeError("no luck today")
        return 0.0

    with pytest.raises(RuntimeError, match="no luck today"):
        tune_on_validation(guide, parameter="prior", values=VALUES, score=failing)
    assert calls == pytest.approx(VALUES[:3])
    assert values(guide)["hyper_prior_scale"].item() == pytest.approx(line.prior)
    torch.testing.assert_close(guide.precision.logdet(), logdet)


def test_bad_arguments(line):
    x, y = held_out()
    guide = line.laplace()
    with pytest.raises(ValueError, match=r"name one hyperparameter .*hyper_prior_scale, .*noise\)"):
        tune_on_validation(guide, x, y)
    with pytest.raises(ValueError, match="name one hyperparameter"):
        tune_on_validation(guide, x, y, parameter="depth")
    with pytest.raises(ValueError, match="values must hold at least one number"):
        tune_on_validation(guide, x, y, parameter="noise", values=())
    with pytest.raises(ValueError, match="the score is NaN at every value"):
        tune_on_validation(guide, parameter="noise", values=VALUES, score=lambda q: float("nan"))
    model = models.Regression(bayesianize(torch.nn.Linear(3, 1)), noise=0.5)
    with pytest.raises(
        ValueError, match=r"name one hyperparameter of the program .there are none."
    ):
        tune_on_validation(line.laplace(model=model), x, y)


def test_a_whole_name_wins_over_a_part(line):
    x, y = held_out()
    guide = line.laplace()
    names = list(guide._read().parameters)
    grid = tune_on_validation(guide, x, y, parameter=names[1], values=(0.5,))
    assert grid.best == 0.5

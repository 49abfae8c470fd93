"""Evaluations: test data in parts, and Laplace approximations as the linear model."""

import math
import warnings

import pyro.distributions as dist
import pytest
import torch
from helpers.comparisons import GRID, labels, line, row_of, weights

from pyro_bdl import (
    LinearizedPredictive,
    Samples,
    bayesianize,
    evaluate,
    guides,
    models,
    working_memory,
)
from pyro_bdl.errors import BdlWarning

Y, CLASSES = GRID[:, 0], torch.arange(9) % 2


def test_scores_do_not_depend_on_the_parts():
    whole = row_of(line, weights(2), GRID, Y)
    with working_memory(8 * 250):
        parts = row_of(line, weights(2), GRID, Y)
    for key in ("rmse", "nlpd"):
        assert parts[key] == pytest.approx(whole[key], rel=1e-5)
    assert parts["crps"] == pytest.approx(whole["crps"], rel=0.1)


def laplace(model, x, y, **options):
    guide = guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
    with torch.no_grad():
        guide.loc += 0.2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        return guide.laplace_approximation((x, y), **options)


def test_laplace_is_scored_as_the_linear_model():
    """A wide posterior: f is Gaussian, which the network at its draws is not."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = models.Regression(bayesianize(net), noise=0.3)
    posterior = laplace(model, GRID[:3], Y[:3])
    found = evaluate(model, posterior, GRID, Y, num_samples=20000)
    moments = LinearizedPredictive(model, posterior).parameter_moments(GRID)["y"]
    mean, variance = moments.mean["loc"], moments.predictive_variance
    error = (variance / 20000).sqrt()
    assert ((found.mean - mean).abs() < 6 * error).all()
    assert found.function.shape == (20000, 9) == found.predictions.shape
    assert ((found.function.var(0) / moments.variance["loc"] - 1).abs() < 0.1).all()
    assert ((found.predictions.var(0) / variance - 1).abs() < 0.1).all()
    exact = -dist.Normal(mean, variance.sqrt()).log_prob(Y).mean()
    rmse = (mean - Y).square().mean().sqrt().item()
    z, normal = (Y - mean) / variance.sqrt(), dist.Normal(0.0, 1.0)
    crps = z * (2 * normal.cdf(z) - 1) + 2 * normal.log_prob(z).exp() - math.pi**-0.5
    crps = float((variance.sqrt() * crps).mean())
    few = evaluate(model, posterior, GRID, Y, num_samples=50, seed=1)
    for scores in (found, few):  # in closed form, for any draws
        assert scores.scores["nlpd"] == pytest.approx(exact.item(), rel=1e-5)
        assert scores.scores["nlpd_normal"] == pytest.approx(exact.item(), rel=1e-5)
        assert scores.scores["rmse"] == pytest.approx(rmse, rel=1e-5)
        assert scores.scores["crps"] == pytest.approx(crps, rel=1e-5)
        assert scores.scores["coverage"] == float((z.abs() < 1.6449).double().mean())
        torch.testing.assert_close(scores.pit, normal.cdf(z).double(), atol=1e-5, rtol=0)
        assert scores.points["nlpd"].over_draws == scores.points["crps"].over_draws == 0.0


@pytest.mark.parametrize(
    "observation, y",
    [
        (lambda logits: dist.Bernoulli(logits=logits[:, 1]), CLASSES.float()),
        (lambda logits: dist.Categorical(logits=logits), CLASSES),
        (lambda logits: dist.OneHotCategorical(logits=logits), torch.eye(2)[CLASSES]),
    ],
    ids=["bernoulli", "categorical", "one-hot"],
)
def test_laplace_of_classes(observation, y):
    program = labels(observation)
    posterior = laplace(program, GRID, y)
    found = evaluate(program, posterior, GRID, y, num_samples=4000)
    ones = LinearizedPredictive(program, posterior).probabilities(GRID)["y"]
    ones = ones[:, 1] if ones.dim() == 2 else ones
    assert found.mean.shape == (9, 2) and (found.mean[:, 1] - ones).abs().max() < 0.05
    assert 0 <= found.scores["accuracy"] <= 1 and {"nlpd", "ece"} <= found.scores.keys()


def test_laplace_of_a_part_of_the_latents():
    """The others stay at the MAP."""
    posterior = laplace(line, GRID, Y, subset=torch.tensor([1]))
    spread = evaluate(line, posterior, GRID, Y, num_samples=3000).function.std(0)
    torch.testing.assert_close(spread, spread[-1] * Y.abs(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mixed", [False, True])
def test_all_numbers_of_the_linear_model_are_about_the_same_functions(mixed):
    """f, its mean and noise, predictions and densities come from the same draws, in all parts."""
    posterior = laplace(line, GRID, Y)
    if mixed:
        posterior = guides.MixtureGuide([posterior, laplace(line, GRID[:4], Y[:4])])
    found = evaluate(line, posterior, GRID, Y, num_samples=50)
    torch.testing.assert_close(found.function, found.expected)
    noise = (found.predictions - found.function) / 0.5
    assert noise.std() == pytest.approx(1.0, abs=0.15)
    density = dist.Normal(found.function, found.noise.sqrt()).log_prob(Y)
    one = -density.double().mean().item()
    assert found.scores["expected_nll"] == pytest.approx(one, rel=1e-5)
    with working_memory(8 * 50 * 2):  # in parts
        parts = evaluate(line, posterior, GRID, Y, num_samples=50)
    assert parts.scores["nlpd"] == pytest.approx(found.scores["nlpd"], rel=1e-5)


def test_the_draws_that_are_kept_are_limited_by_all_their_numbers(monkeypatch):
    """Nine points of two classes: 18 numbers a draw, so that 180 numbers are ten draws."""
    monkeypatch.setattr("pyro_bdl.comparison.evaluate.MOST_NUMBERS", 180)
    program = labels(lambda logits: dist.Categorical(logits=logits))
    found = evaluate(program, Samples({"w": torch.randn(1, 50, 2)}), GRID, CLASSES)
    assert found.function.shape == (10, 9, 2)


@pytest.mark.parametrize("make", [lambda: weights(2), lambda: laplace(line, GRID, Y)])
def test_units_scale_every_number(make):
    """y in units of a third, from 2: sds times 3, variances times 9, densities less log 3."""
    posterior = make()
    one, other = (
        evaluate(line, posterior, GRID, Y, units=units) for units in ((1.0, 0.0), (3.0, 2.0))
    )
    torch.testing.assert_close(other.noise, 9 * one.noise)
    for name in ("function", "mean", "predictions", "expected", "y"):
        torch.testing.assert_close(getattr(other, name), 3 * getattr(one, name) + 2)
    for key in ("rmse", "crps", "aleatoric", "epistemic"):
        assert other.scores[key] == pytest.approx(3 * one.scores[key], rel=1e-4)
    for key in ("nlpd", "nlpd_normal", "expected_nll"):
        assert other.scores[key] == pytest.approx(one.scores[key] + math.log(3), rel=1e-4)
    assert other.scores["nlpd_se"] == pytest.approx(one.scores["nlpd_se"], rel=1e-4)
    for key in ("coverage", "temperature"):
        if key in one.scores:
            assert other.scores[key] == pytest.approx(one.scores[key], rel=1e-4)


@pytest.mark.parametrize("draws, known", [(39, False), (40, True)])
def test_forty_draws_give_the_range_of_a_coverage(draws, known):
    scores = evaluate(line, weights(2, chains=1, count=draws), GRID, Y).scores
    assert ("coverage_from" in scores) == known


def test_an_evaluation_prints_as_its_scores():
    found = evaluate(line, weights(2), GRID, Y)
    shown = repr(found)
    assert shown.startswith("<Evaluation at 9 test rows, regression: rmse ") and len(shown) < 500

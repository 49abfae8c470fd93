"""Posteriors that are known by their predictions alone."""

import pyro.distributions as dist
import pytest
import torch
from helpers.comparisons import GRID, labels, line, weights

from pyro_bdl import PredictiveDraws, compare

Y = GRID[:, 0]
coin = labels(lambda logits: dist.Bernoulli(logits=logits[:, 1]))


def function(samples):
    w = samples.flat()["w"]
    return w[:, :1] + w[:, 1:] * Y


def test_predictions_take_the_place_of_their_posterior():
    """The numbers are those of the samples that the predictions come from."""
    exact = weights(2, seed=1, count=200)
    f = function(exact)
    known = PredictiveDraws(f, f + 0.5 * torch.randn_like(f), dist.Normal(f, 0.5).log_prob(Y))
    posteriors = {"vi": weights(2, count=200), "exact": known, "same": exact}
    found = compare(line, posteriors, GRID, Y, reference="exact", units=(10.0, 3.0))
    del posteriors["exact"]
    plain = compare(line, posteriors, GRID, Y, reference="same", units=(10.0, 3.0))
    rows, expected = found.numbers(), plain.numbers()
    for key in ("mean_error", "sd_error", "wasserstein", "wasserstein2", "sd_ratio", "khat_high"):
        assert rows["vi"][key] == pytest.approx(expected["vi"][key], rel=1e-4)
    for key in ("nlpd", "expected_nll"):
        assert rows["exact"][key] == pytest.approx(expected["same"][key], rel=1e-4)
    for key in ("rmse", "crps", "coverage"):
        assert rows["exact"][key] == pytest.approx(expected["same"][key], rel=0.15)
    assert rows["same"]["wasserstein"] == pytest.approx(0, abs=1e-5)
    assert not found.warnings and "rhat" not in rows["exact"]
    assert rows["exact, half to half"]["wasserstein"] > 0


def test_the_function_alone_is_enough_and_the_rest_stays_open():
    known = PredictiveDraws(function(weights(2, seed=1)))
    rows = compare(line, {"vi": weights(2), "exact": known}, GRID, Y, reference="exact").numbers()
    assert rows["vi"]["wasserstein"] > 0 and "kl" not in rows["vi"]
    assert {"rmse"} == {"rmse", "nlpd", "crps", "pit"} & set(rows["exact"])


@pytest.mark.parametrize("both", [False, True])
def test_class_probabilities(both):
    exact = weights(2, seed=1)
    ones = function(exact).sigmoid()
    known = PredictiveDraws(torch.stack([1 - ones, ones], -1) if both else ones)
    posteriors = {"vi": weights(2), "exact": known, "same": exact}
    y = (torch.arange(9) % 2).float()
    rows = compare(coin, posteriors, GRID, y, reference="exact").numbers()
    shared = ("accuracy", "nlpd", "expected_nll", "brier", "ece", "ace", "confidence")
    for key in (*shared, "aleatoric", "epistemic"):
        assert rows["exact"][key] == pytest.approx(rows["same"][key], rel=1e-4)
    for key in ("total_variation", "kl", "wasserstein"):
        assert rows["same"][key] == pytest.approx(0, abs=1e-5) and rows["vi"][key] > 1e-4


def test_chains_of_predictions_are_checked():
    f = function(weights(2, seed=1))
    f[50:] += 3
    posteriors = {"vi": weights(2), "old": PredictiveDraws(f, chains=2)}
    found = compare(line, posteriors, GRID, Y, reference="old")
    assert found.numbers()["old"]["rhat"] > 1.5 and "cannot be trusted" in found.warnings[0]

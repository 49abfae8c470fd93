"""Metrics equal scipy, hand-made values and closed forms."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm, wasserstein_distance

from pyro_bdl import metrics


@pytest.fixture
def draws():
    return torch.from_numpy(np.random.default_rng(0).standard_normal((60, 7, 2)))


def test_rmse_by_hand():
    assert metrics.rmse(torch.tensor([1.0, 2.0]), torch.tensor([4.0, -2.0])) == math.sqrt(12.5)


def test_scores_of_probabilities_by_hand():
    p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]], dtype=torch.float64)
    y = torch.tensor([0, 1])
    assert metrics.accuracy(p, y) == 0.5
    expected = ((0.09 + 0.04 + 0.01) + (0.01 + 0.49 + 0.36)) / 2
    assert metrics.brier(p, y) == pytest.approx(expected, rel=1e-12)


def test_negative_log_predictive_density_by_hand():
    p = torch.tensor([[0.1, 0.4], [0.3, 0.2]], dtype=torch.float64)
    expected = -(math.log(0.2) + math.log(0.3)) / 2
    assert metrics.negative_log_predictive_density(p.log()) == pytest.approx(expected, rel=1e-12)
    tiny = torch.full((3, 1), -2000.0)
    assert metrics.negative_log_predictive_density(tiny) == pytest.approx(2000.0)


def test_crps_is_the_fair_double_sum(draws):
    y = torch.linspace(-1, 1, 14, dtype=torch.float64).reshape(7, 2)
    size = draws.shape[0]
    pairs = (draws[:, None] - draws[None]).abs().sum((0, 1)) / (size * (size - 1))
    expected = ((draws - y).abs().mean(0) - pairs / 2).mean()
    torch.testing.assert_close(metrics.crps(draws, y), expected, rtol=1e-12, atol=0)


def test_crps_of_a_gaussian_is_the_closed_form():
    quantiles = torch.from_numpy(norm.ppf((np.arange(20000) + 0.5) / 20000))
    y = torch.tensor([-1.5, 0.0, 0.7], dtype=torch.float64)
    z = y.numpy()
    expected = z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi)
    got = metrics.crps(quantiles[:, None].expand(-1, 3), y)
    assert got == pytest.approx(expected.mean(), abs=1e-4)
    scaled = metrics.crps(3 + 2 * quantiles[:, None].expand(-1, 3), 3 + 2 * y)
    assert scaled == pytest.approx(2 * expected.mean(), abs=2e-4)


def test_crps_is_fair_at_two_draws():
    rng = np.random.default_rng(1)
    pairs = torch.from_numpy(rng.standard_normal((2, 200_000)))
    got = metrics.crps(pairs, torch.zeros(200_000, dtype=torch.float64))
    closed_form = 2 * norm.pdf(0) - 1 / math.sqrt(math.pi)
    assert got == pytest.approx(closed_form, abs=0.005)


def test_interval_coverage_by_hand():
    values = torch.arange(11, dtype=torch.float64)[:, None].expand(-1, 4)
    y = torch.tensor([1.0, 0.99, 9.0, 9.01], dtype=torch.float64)
    assert metrics.interval_coverage(values, y, level=0.8) == 0.5
    several = metrics.interval_coverage(values, y, level=[0.0, 0.8, 1.0])
    assert several.tolist() == [0.0, 0.5, 1.0]


def test_interval_coverage_uses_numpy_quantiles(draws):
    y = torch.from_numpy(np.random.default_rng(2).standard_normal((7, 2)))
    low, high = np.quantile(draws.numpy(), [0.2, 0.8], axis=0)
    expected = ((low <= y.numpy()) & (y.numpy() <= high)).mean()
    assert metrics.interval_coverage(draws, y, level=0.6) == pytest.approx(expected)


def test_calibration_error_by_hand():
    confidence = torch.tensor([0.95, 0.85, 0.85, 0.55], dtype=torch.float64)
    p = torch.stack([confidence, 1 - confidence], -1)
    y = torch.tensor([0, 0, 1, 1])
    expected = 0.25 * 0.05 + 0.5 * 0.35 + 0.25 * 0.55
    got = metrics.expected_calibration_error(p, y, bins=10)
    assert got == pytest.approx(expected, rel=1e-12)
    mean, right, share = metrics.reliability(p, y, bins=10)
    assert share.tolist() == [0, 0, 0, 0, 0, 0.25, 0, 0, 0.5, 0.25]
    assert right[8] == 0.5 and mean[8] == pytest.approx(0.85)
    assert torch.isnan(right[0])


def test_a_certain_prediction_falls_in_the_last_bin():
    p = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert metrics.expected_calibration_error(p, torch.tensor([0, 1])) == 0
    assert metrics.expected_calibration_error(p, torch.tensor([1, 0])) == 1


def test_mean_and_sd_error_by_hand():
    a = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    b = torch.tensor([[1.0, 5.0]])
    assert metrics.mean_error(a, b) == pytest.approx(math.sqrt((0 + 9) / 2))
    assert metrics.sd_error(a, b) == pytest.approx(math.sqrt(2))
    assert metrics.sd_error(b, a) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("size", [60, 1, 30, 45, 77])
def test_wasserstein_equals_scipy(draws, size):
    other = torch.from_numpy(np.random.default_rng(size).standard_exponential((size, 7, 2)))
    a, b = draws.flatten(1).numpy(), other.flatten(1).numpy()
    expected = np.mean([wasserstein_distance(a[:, i], b[:, i]) for i in range(14)])
    assert metrics.wasserstein1(draws, other) == pytest.approx(expected, rel=1e-12)
    assert metrics.wasserstein1(other, draws) == pytest.approx(expected, rel=1e-12)
    assert metrics.wasserstein1(draws + 3, draws) == pytest.approx(3, rel=1e-12)


def test_class_distances_by_hand():
    a = torch.tensor([[[0.9, 0.1], [0.4, 0.6]], [[0.5, 0.5], [0.2, 0.8]]])
    b = torch.tensor([[[0.6, 0.4], [0.6, 0.4]]])
    assert metrics.agreement(a, b) == 0.5
    assert metrics.total_variation(a, b) == pytest.approx((0.1 + 0.3) / 2)


def test_split_half_cuts_between_chains():
    draws = torch.tensor([0.0, 0.0, 1.0, 1.0, 3.0, 3.0])[:, None]
    assert metrics.split_half(draws, metrics.mean_error) == pytest.approx(7 / 3 - 1 / 3)
    assert metrics.split_half(draws, metrics.mean_error, chains=3) == 2
    with pytest.raises(ValueError, match="chains=4"):
        metrics.split_half(draws, metrics.mean_error, chains=4)


def test_blocks_do_not_change_the_result(draws, monkeypatch):
    y = torch.zeros(7, 2, dtype=torch.float64)
    functions = {
        "crps": lambda: metrics.crps(draws, y),
        "coverage": lambda: metrics.interval_coverage(draws, y, level=[0.5, 0.9]),
        "wasserstein": lambda: metrics.wasserstein1(draws, draws[:20] + 1),
        "sd": lambda: metrics.sd_error(draws, 2 * draws[:20]),
        "variation": lambda: metrics.total_variation(draws.softmax(-1), draws[:9].softmax(-1)),
        "density": lambda: metrics.negative_log_predictive_density(draws[..., 0]),
    }
    whole = {name: function() for name, function in functions.items()}
    monkeypatch.setattr(metrics, "_BLOCK_NUMBERS", 130)
    for name, function in functions.items():
        torch.testing.assert_close(function(), whole[name], rtol=1e-12, atol=0)


def test_single_precision_is_scored_in_double(draws):
    a, y = draws.float(), torch.zeros(7, 2)
    assert metrics.crps(a, y) == metrics.crps(a.double(), y.double())
    assert metrics.wasserstein1(a, a[:7]).dtype == torch.float64
    assert not metrics.crps(a.requires_grad_(), y).requires_grad


def test_bad_input(draws):
    y = torch.zeros(7, 2)
    with pytest.raises(ValueError, match=r"\(S, 7, 2\)"):
        metrics.crps(draws[..., 0], y)
    with pytest.raises(ValueError, match="2 draws"):
        metrics.crps(draws[:1], y)
    with pytest.raises(ValueError, match="level"):
        metrics.interval_coverage(draws, y, level=90)
    with pytest.raises(ValueError, match="same test points"):
        metrics.wasserstein1(draws, draws[:, :3])
    with pytest.raises(ValueError, match="from 0 to 1"):
        metrics.brier(torch.full((3, 2), 0.5), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"\(N, C\)"):
        metrics.accuracy(torch.full((3, 2), 0.5), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="same shape"):
        metrics.rmse(torch.zeros(3, 1), torch.zeros(3))
    with pytest.raises(ValueError, match=r"\(draws, points\)"):
        metrics.negative_log_predictive_density(torch.zeros(3))

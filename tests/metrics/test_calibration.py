"""Intervals, probability integral transforms and calibration errors."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import binom, kstest

from pyro_bdl import metrics
from pyro_bdl.metrics.calibration import (
    calibration_error_by_chance,
    coverage_range,
    mean_confidence,
    uniformity,
)


def test_interval_coverage_by_hand():
    """With three draws a target has rank 0, 1, 2 or 3, each a quarter; three that are equal are all
    of them. Source: Czado, Gneiting & Held 2009, section 2.1."""
    values = torch.tensor([1.0, 2.0, 3.0]).double()[:, None].expand(-1, 4)
    y = torch.tensor([0.0, 1.5, 2.5, 9.0], dtype=torch.float64)
    assert metrics.interval_coverage(values, y, level=0.5) == 0.5
    several = metrics.interval_coverage(values, y, level=[0.0, 0.25, 0.75, 1.0])
    assert several.tolist() == [0.0, 0.25, 0.75, 1.0]
    assert metrics.interval_coverage(values[:, :1], y[:1], level=0.75) == 0.5
    equal = metrics.interval_coverage(values[:, :1], torch.tensor([2.0]), level=0.75)
    assert equal == 1.0  # ranks 1 and 2, the middle half
    tied = metrics.interval_coverage(torch.ones(3, 1), torch.ones(1), level=[0.3, 0.9])
    assert tied.tolist() == pytest.approx([0.3, 0.9])


@pytest.mark.parametrize("size", [5, 40])
@pytest.mark.parametrize("rate", [None, 1.0])
def test_coverage_is_the_level_where_the_model_is_true(size, rate):
    """With as few draws as five, and for counts, of which [0, 3] holds 98 % at rate 1."""
    torch.manual_seed(4)
    draw = torch.randn if rate is None else lambda *shape: torch.poisson(torch.full(shape, rate))
    levels = torch.tensor([0.5, 0.9, 0.95]).double()
    found = metrics.interval_coverage(draw(size, 20_000), draw(20_000), level=levels.tolist())
    assert ((found - levels).abs() < 4 * (levels * (1 - levels) / 20_000).sqrt()).all()


def test_coverage_of_independent_targets_is_binomial():
    torch.manual_seed(5)
    low, high = coverage_range(torch.randn(1000, 50)).tolist()
    exact = binom(50, 0.9)
    assert low == pytest.approx(exact.ppf(0.025) / 50, abs=0.021)
    assert high == pytest.approx(exact.ppf(0.975) / 50, abs=0.021)
    two = torch.tensor([[1.0], [2.0]])  # ranks 0 to 1/2 and 1/2 to 1: half of each is inside
    assert coverage_range(two, level=0.5).tolist() == [0.5, 0.5]
    one = torch.randn(100, 1).expand(100, 7)  # of one function, all or none
    assert coverage_range(one).tolist() == [0, 1]
    counts = coverage_range(torch.poisson(torch.ones(2000, 3)), probability=0.0)
    assert 0.8 < counts[0] == counts[1] <= 1


def test_calibration_error_by_hand():
    """sum_b share_b |accuracy_b - confidence_b| (Guo et al. 2017, equation 3)."""
    confidence = torch.tensor([0.95, 0.85, 0.85, 0.55], dtype=torch.float64)
    p = torch.stack([confidence, 1 - confidence], -1)
    y = torch.tensor([0, 0, 1, 1])
    expected = 0.25 * 0.05 + 0.5 * 0.35 + 0.25 * 0.55
    got = metrics.expected_calibration_error(p, y, bins=10)
    assert got == pytest.approx(expected, rel=1e-12)
    mean, right, share = metrics.reliability(p, y, bins=10)
    assert share.tolist() == [0, 0, 0, 0, 0, 0.25, 0, 0, 0.5, 0.25]
    assert right[8] == 0.5 and mean[8] == pytest.approx(0.85)
    assert mean_confidence(p) == pytest.approx(0.8)
    assert torch.isnan(right[0])
    certain = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # falls in the last bin
    assert metrics.expected_calibration_error(certain, torch.tensor([0, 1])) == 0
    assert metrics.expected_calibration_error(certain, torch.tensor([1, 0])) == 1
    with pytest.raises(ValueError, match=r"average the draws first, probabilities\.mean\(0\)"):
        metrics.expected_calibration_error(certain[None], torch.tensor([1, 0]))


def test_the_calibration_error_by_chance_is_that_of_many_calibrated_targets():
    p = torch.rand(80, 3, dtype=torch.float64).add(0.2).log().mul(2).softmax(-1)
    targets = torch.distributions.Categorical(p).sample((400,))
    found = [metrics.expected_calibration_error(p, y, bins=6) for y in targets]
    mean = float(torch.stack(found).mean())
    assert calibration_error_by_chance(p, bins=6) == pytest.approx(mean, rel=0.05)
    assert calibration_error_by_chance(torch.eye(3)) == 0


def test_adaptive_calibration_error_by_hand():
    """Bins of equally many points (Nguyen & O'Connor 2015, section 3.1)."""
    confidence = torch.tensor([0.55, 0.95, 0.85, 0.65], dtype=torch.float64)
    p = torch.stack([confidence, 1 - confidence], -1)
    y = torch.tensor([0, 0, 1, 1])
    # bins {0.55 right, 0.65 wrong} and {0.85 wrong, 0.95 right}
    expected = (abs(1 - 0.55 - 0.65) + abs(1 - 0.85 - 0.95)) / 4
    got = metrics.adaptive_calibration_error(p, y, bins=2)
    assert got == pytest.approx(expected, rel=1e-12)
    one_each = (0.45 + 0.05 + 0.85 + 0.65) / 4
    assert metrics.adaptive_calibration_error(p, y, bins=9) == pytest.approx(one_each, rel=1e-12)


def test_adaptive_calibration_error_of_equal_confidences_does_not_depend_on_the_order_of_rows():
    """Seven of ten are right at a confidence of 0.7, and the right ones come first."""
    p = torch.tensor([0.7, 0.3], dtype=torch.float64).expand(10, 2)
    y = (torch.arange(10) >= 7).long()
    for bins in (1, 2, 5):
        assert metrics.adaptive_calibration_error(p, y, bins=bins) == pytest.approx(0, abs=1e-12)


def test_coverage_of_an_interval_that_is_too_narrow():
    """Targets of twice the sd: P(|z| < 1.645 / 2)."""
    torch.manual_seed(0)
    draws, y = torch.randn(500, 4000), 2 * torch.randn(4000)
    levels = [0.5, 0.9, 0.95]
    z = torch.special.ndtri(torch.tensor([(1 + level) / 2 for level in levels]).double())
    exact = 2 * torch.special.ndtr(z / 2) - 1
    found = metrics.interval_coverage(draws, y, level=levels)
    assert ((found - exact).abs() < 4 * (exact * (1 - exact) / 4000).sqrt() + 0.003).all()


@pytest.mark.parametrize("size", [3, 200])
def test_pit_is_uniform_for_the_true_model(size):
    """Also of counts, and of as few draws as three."""
    torch.manual_seed(1)
    for draw in (torch.randn, lambda *shape: torch.poisson(torch.full(shape, 1.5))):
        values = metrics.pit(draw(size, 3000), draw(3000))
        assert kstest(values.numpy(), "uniform").pvalue > 0.01
        assert uniformity(values) < 1.63 / math.sqrt(3000)  # at the 1 % level


def test_pit_of_censored_targets_and_of_weighted_draws():
    """Censored numbers are uniform too; weights give the law they stand for: of draws of
    Normal(0, 1), ratios exp(x - 1/2) give Normal(1, 1)."""
    torch.manual_seed(0)
    y, draws = torch.randn(4000).double(), torch.randn(600, 4000).double()
    limit = torch.tensor(0.3).double()
    known = torch.where(y > limit, limit, y)
    values = metrics.pit(draws, known, upper=torch.where(y > limit, torch.inf, y))
    assert uniformity(values) < 1.63 / 4000**0.5
    of_limits = metrics.pit(draws, known)  # taken for the targets
    assert uniformity(of_limits) > 0.2
    left = torch.where(y < limit, -torch.inf, y)
    assert uniformity(metrics.pit(draws, left, upper=y.clamp_min(limit))) < 1.63 / 4000**0.5
    log_weights = draws.log_softmax(0)
    shifted = metrics.pit(draws, y + 1, log_weights=log_weights)
    assert uniformity(shifted) < 1.63 / 4000**0.5 + 0.01
    assert uniformity(metrics.pit(draws, y + 1)) > 0.3
    even = torch.full_like(draws[:, :9], 1 / 600).log()
    torch.manual_seed(1)
    plain = metrics.pit(draws[:, :9], y[:9])
    torch.manual_seed(1)
    torch.testing.assert_close(metrics.pit(draws[:, :9], y[:9], log_weights=even), plain)


def test_pit_by_hand():
    """(#{x < y} + u (#{x = y} + 1)) / (S + 1) (Czado, Gneiting & Held 2009)."""
    draws = torch.tensor([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    values = metrics.pit(draws, torch.tensor([2.5, 1.0]))
    assert 0.5 <= values[0] <= 0.75  # above two of three
    assert values.shape == (2,) and 0 <= values[1] <= 1


def test_uniformity_equals_scipy():
    values = torch.from_numpy(np.random.default_rng(3).beta(2, 3, size=(5, 9)))
    expected = kstest(values.flatten().numpy(), "uniform").statistic
    assert uniformity(values) == pytest.approx(expected, rel=1e-12)

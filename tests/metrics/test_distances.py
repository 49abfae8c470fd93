"""Distances of marginals equal scipy, hand-made values and closed forms."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm, wasserstein_distance

from pyro_bdl import metrics
from pyro_bdl.metrics.distances import wasserstein1_by_chance


@pytest.fixture
def draws():
    return torch.from_numpy(np.random.default_rng(0).standard_normal((60, 7, 2)))


def test_mean_and_sd_error_by_hand():
    a = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    b = torch.tensor([[1.0, 5.0]])
    assert metrics.mean_error(a, b) == pytest.approx(math.sqrt((0 + 9) / 2))
    assert metrics.sd_error(a, b) == pytest.approx(math.sqrt(2))
    assert metrics.sd_error(b, a) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("size", [60, 1, 30, 45, 77])
def test_wasserstein_equals_scipy(draws, size):
    """W1 = int |F_a^-1 - F_b^-1| du (Villani 2003, section 2.2)."""
    other = torch.from_numpy(np.random.default_rng(size).standard_exponential((size, 7, 2)))
    a, b = draws.flatten(1).numpy(), other.flatten(1).numpy()
    expected = np.mean([wasserstein_distance(a[:, i], b[:, i]) for i in range(14)])
    assert metrics.wasserstein1(draws, other) == pytest.approx(expected, rel=1e-12)
    assert metrics.wasserstein1(other, draws) == pytest.approx(expected, rel=1e-12)
    assert metrics.wasserstein1(draws + 3, draws) == pytest.approx(3, rel=1e-12)


def quantiles(mean, sd, count):
    """Draws that are the quantiles of a Normal, so that there is no Monte Carlo error."""
    levels = (np.arange(count) + 0.5) / count
    return torch.from_numpy(norm.ppf(levels, mean, sd))[:, None]


def test_wasserstein2_by_hand():
    a, b = torch.tensor([[0.0], [4.0]]), torch.tensor([[1.0], [2.0], [3.0], [7.0]])
    # quantile functions 0, 0, 4, 4 and 1, 2, 3, 7
    assert metrics.wasserstein2(a, b) == pytest.approx(math.sqrt((1 + 4 + 1 + 9) / 4))
    assert metrics.wasserstein1(a, b) == pytest.approx((1 + 2 + 1 + 3) / 4)
    assert metrics.wasserstein2(a, a) == 0


@pytest.mark.parametrize("sizes", [(100, 400), (30, 30)])
def test_the_distance_by_chance_is_that_of_many_samples(sizes):
    """E W1 of two samples of one Normal, by 400 repetitions, whose mean has an error of 2 %."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, 400, generator=generator).double() for size in sizes)
    exact = quantiles(0.0, 1.0, 4000)
    found = wasserstein1_by_chance(exact, *sizes)
    assert found == pytest.approx(float(metrics.wasserstein1(a, b)), rel=0.06)
    assert wasserstein1_by_chance(3 * exact, *sizes) == pytest.approx(3 * found)
    assert math.isnan(wasserstein1_by_chance(exact, math.nan, 10))

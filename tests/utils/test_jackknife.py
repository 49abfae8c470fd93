"""The grouped jackknife against closed forms."""

import math

import pytest
import torch
from scipy import stats

from pyro_bdl.utils.jackknife import enlarged, jackknife_error, number_of_groups, without_each


def test_of_a_mean_it_is_the_error_of_the_mean_of_group_means():
    x = torch.randn(120, 3, dtype=torch.float64)
    found = jackknife_error(torch.stack([part.mean(0) for part in without_each(x, 10)]))
    groups = x.reshape(10, 12, 3).mean(1)
    torch.testing.assert_close(found, groups.std(0) / math.sqrt(10))


@pytest.mark.parametrize(
    "counts, groups",
    [((1000,), 10), ((40,), 10), ((39, 1000), 9), ((20,), 5), ((19.9,), 0), ((math.nan, 50), 0)],
)
def test_groups_have_four_draws_each(counts, groups):
    assert number_of_groups(*counts) == groups


def test_two_enlarged_errors_are_as_rare_as_two_of_a_normal():
    assert 2 * enlarged(2.0, (0.3, 9)) == pytest.approx(stats.t(9).ppf(stats.norm.cdf(2)))
    two = enlarged(2.0, (0.3, 9), (0.3, 9))  # Welch: 18 degrees of freedom
    assert 2 * two == pytest.approx(stats.t(18).ppf(stats.norm.cdf(2)))
    assert enlarged(2.0, (1.0, 10**6), (0.0, 9)) == pytest.approx(1, abs=1e-4)
    assert enlarged(2.0, (0.0, 9)) == enlarged(2.0, (math.nan, 9)) == 1.0

"""Errors and floors of distances."""

import math

import pytest
import torch

from pyro_bdl import metrics


def test_split_half_cuts_between_chains():
    draws = torch.tensor([0.0, 0.0, 1.0, 1.0, 3.0, 3.0])[:, None]
    assert metrics.split_half(draws, metrics.mean_error) == pytest.approx(7 / 3 - 1 / 3)
    assert metrics.split_half(draws, metrics.mean_error, chains=3) == 2
    with pytest.raises(ValueError, match="chains=4"):
        metrics.split_half(draws, metrics.mean_error, chains=4)


def repeated(distance, draw, count=100):
    """The sd of a distance over repeated draws, known to 7 %, and the mean of its errors."""
    torch.manual_seed(0)
    found, errors = [], []
    for _ in range(count):
        a, b = draw()
        found.append(distance(a, b).double())
        errors.append(metrics.monte_carlo_error(distance, a, b).double())
    return torch.stack(found).std().item(), torch.stack(errors).mean().item()


@pytest.mark.parametrize(
    "distance", ["mean_error", "sd_error", "wasserstein1", "wasserstein2", "energy_distance"]
)
def test_the_error_is_that_of_repeated_draws(distance):
    """Between Normal(0.5, 0.6) and Normal(0, 1) at four points, 160 draws each. The grouped
    jackknife (Kuensch 1989, section 2)."""
    true, said = repeated(
        getattr(metrics, distance),
        lambda: (0.5 + 0.6 * torch.randn(160, 4), torch.randn(160, 4)),
    )
    assert said == pytest.approx(true, rel=0.25)


@pytest.mark.parametrize("distance", ["mean_error", "wasserstein1", "energy_distance"])
def test_the_error_is_right_where_distances_are_bent(distance):
    """Functions that are one number at two points, 1.5 standard errors of the mean apart: the
    distances of a tenth of the draws are mostly noise, which makes their sd 0.5 to 1.4 of it."""
    one = torch.ones(1, 2)
    true, said = repeated(
        getattr(metrics, distance),
        lambda: ((0.15 + torch.randn(200, 1)) * one, torch.randn(200, 1) * one),
        count=150,
    )
    assert said == pytest.approx(true, rel=0.3)


def test_the_error_of_an_agreement_that_hangs_in_the_balance():
    """All points are of the same class, the first one by 1.5 standard errors of its mean."""

    def draw():
        p = (0.5 + 0.02 + 0.2 * torch.randn(200, 1)).expand(200, 5)
        return torch.stack([p, 1 - p], -1), torch.tensor([0.6, 0.4]).expand(200, 5, 2)

    true, said = repeated(metrics.agreement, draw, count=150)
    assert said == pytest.approx(true, rel=0.5)  # of groups alone it would be a third


def test_the_error_of_a_mean_is_the_textbook_one():
    torch.manual_seed(0)
    a, b = torch.randn(4000, 1) + 9, torch.zeros(4000, 1)
    found = metrics.monte_carlo_error(metrics.mean_error, a, b, groups=200)
    assert found == pytest.approx(1 / math.sqrt(4000), rel=0.2)


def test_correlated_draws_have_a_larger_error():
    """A hundred draws, each held for twenty steps: the error of a hundred, not of 2000."""
    torch.manual_seed(0)
    draws = torch.randn(100, 1) + 3
    found = metrics.monte_carlo_error(
        metrics.mean_error, draws.repeat_interleave(20, 0), torch.zeros(2000, 1), groups=20
    )
    assert found == pytest.approx(0.1, rel=0.5)


def test_several_distances_at_once_and_too_few_draws():
    a, b = torch.randn(40, 3), torch.randn(50, 3)

    def both(p, q):
        return torch.stack([metrics.mean_error(p, q), metrics.sd_error(p, q)])

    found = metrics.monte_carlo_error(both, a, b)
    torch.testing.assert_close(found[1], metrics.monte_carlo_error(metrics.sd_error, a, b))
    assert metrics.monte_carlo_error(both, a[:19], b).isnan().all()
    assert not metrics.monte_carlo_error(both, a[:20], b).isnan().any()

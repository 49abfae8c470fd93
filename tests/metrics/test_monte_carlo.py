"""Errors and floors of distances."""

import pytest
import torch

from pyro_bdl import metrics
from pyro_bdl.utils.jackknife import halves, monte_carlo_error


def test_halves_are_cut_between_chains():
    draws = torch.arange(6.0)[:, None]
    for chains, size in ((1, 3), (3, 2)):
        first, last = halves(draws, chains=chains)
        assert first.flatten().tolist() == list(range(size)) and len(last) == 6 - size
    with pytest.raises(ValueError, match="chains=4"):
        halves(draws, chains=4)


def repeated(distance, draw, count=100):
    """The sd of a distance over repeated draws, known to 7 %, and the mean of its errors."""
    torch.manual_seed(0)
    found, errors = [], []
    for _ in range(count):
        a, b = draw()
        found.append(distance(a, b).double())
        errors.append(monte_carlo_error(distance, a, b)[0].double())
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


def test_correlated_draws_have_a_larger_error():
    """A hundred draws, each held for twenty steps: the error of a hundred, not of 2000."""
    torch.manual_seed(0)
    draws = torch.randn(100, 1) + 3
    found, _ = monte_carlo_error(
        metrics.mean_error, draws.repeat_interleave(20, 0), torch.zeros(2000, 1), groups=20
    )
    assert found == pytest.approx(0.1, rel=0.5)


def test_several_distances_at_once_and_too_few_draws():
    a, b = torch.randn(40, 3), torch.randn(50, 3)

    def both(p, q):
        return torch.stack([metrics.mean_error(p, q), metrics.sd_error(p, q)])

    found, alone = monte_carlo_error(both, a, b), monte_carlo_error(metrics.sd_error, a, b)
    torch.testing.assert_close([part[1] for part in found], list(alone))
    assert all(part.isnan().all() for part in monte_carlo_error(both, a[:19], b))
    assert not any(part.isnan().any() for part in monte_carlo_error(both, a[:20], b))


def test_what_few_draws_add_to_a_distance():
    """To the root mean square of means of Normal(m, 1) it is sqrt(m^2 + 1 / S) - m."""
    noise, b = torch.randn(400, 300).double(), torch.zeros(40, 300).double()
    for m in (0.0, 0.1, 1.0):
        _, added = monte_carlo_error(metrics.mean_error, m + noise, b)
        assert added == pytest.approx((m**2 + 1 / 400) ** 0.5 - m, rel=0.3, abs=2e-3)

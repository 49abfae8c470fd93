"""The generalized Pareto fit, and importance sampling with known tails."""

import math

import pytest
import torch

from pyro_bdl.diagnostics.psis import good_k, psis


@pytest.mark.parametrize("k", [0.1, 0.5, 0.9])
def test_ratios_with_a_pareto_tail(k):
    """u^-k with u uniform has a tail of shape k; the fit draws it to 0.5 with 10 of n + 10. Source:
    Vehtari et al. 2024, appendix C."""
    log_ratios = -k * torch.rand(4, 1000, 200, dtype=torch.float64).log()
    found = psis(log_ratios)
    expected = (189 * k + 5) / (189 + 10)
    assert abs(found.pareto_k.mean() - expected) < 5 * found.pareto_k.std() / math.sqrt(200) + 0.02
    torch.testing.assert_close(found.log_weights.exp().sum((0, 1)), torch.ones(200).double())
    # The mean of the ratios exists for k < 1 and is 1 / (1 - k); smoothing must not lose it.
    if k < 0.6:
        largest = log_ratios.amax((0, 1))
        scaled = (log_ratios - largest).exp().mean((0, 1)) * largest.exp()
        assert abs(scaled.mean() * (1 - k) - 1) < 0.1


def test_smoothed_weights_recover_a_shifted_normal():
    """Target N(0.5, 1) from N(0, 1.5^2): means and variances within 5 standard errors."""
    x = 1.5 * torch.randn(1, 2000, 100, dtype=torch.float64)
    found = psis(-0.5 * (x - 0.5).square() + 0.5 * (x / 1.5).square() + 7.0)
    weight = found.log_weights.exp()
    mean, square = (weight * x).sum((0, 1)), (weight * x.square()).sum((0, 1))
    for value, expected in ((mean, 0.5), (square, 1.25)):
        assert abs(value.mean() - expected) < 5 * value.std() / 10 + 0.002
    assert (found.pareto_k < good_k(2000)).all()


def test_order_is_kept_and_nothing_exceeds_the_largest_ratio():
    log_ratios = 2 * torch.randn(1, 500, 5, dtype=torch.float64)
    smoothed = psis(log_ratios).log_weights
    order = log_ratios[0].argsort(0)
    assert (smoothed[0].gather(0, order).diff(dim=0) >= 0).all()
    raw = log_ratios - log_ratios.amax(1, keepdim=True)
    shift = (smoothed - raw)[0].gather(0, order)
    assert torch.allclose(shift[:400], shift[:1].expand(400, 5))  # below the tail untouched
    assert (smoothed[0] - shift[:1] <= 1e-12).all()


def test_equal_ratios_few_draws_and_ratios_that_vanish_beside_the_largest():
    equal = psis(torch.full((2, 100), 3.0))
    assert equal.pareto_k.isnan()
    torch.testing.assert_close(equal.log_weights.exp(), torch.full((2, 100), 0.005).double())
    few = torch.randn(1, 20, dtype=torch.float64)
    found = psis(few)
    assert found.pareto_k == torch.inf
    torch.testing.assert_close(found.log_weights, few.log_softmax(-1))
    ratios = torch.linspace(-30000, 0, 400, dtype=torch.float64)[None]  # exp underflows
    assert psis(ratios).pareto_k == torch.inf


def test_good_k():
    """min(1 - 1 / log10(S), 0.7) (Vehtari et al. 2024, section 3.2.4)."""
    assert good_k(100) == 0.5
    assert good_k(4000) == 0.7

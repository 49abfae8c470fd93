"""Pareto-smoothed importance sampling at its edges; parity with ArviZ is in ``test_arviz.py``."""

import torch

from pyro_bdl.diagnostics.psis import good_k, psis


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

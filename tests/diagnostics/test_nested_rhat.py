"""R-hat of many short chains from few starting points, and its limit."""

import numpy as np
import pytest
import torch

from pyro_bdl.diagnostics import rhat
from pyro_bdl.diagnostics.rhat import limit_of_rhat


def test_values_of_arviz():
    """``rhat_nested`` of arviz-stats 1.3.3: shifted, heavy tails with odd lengths, ties."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((12, 6))
    x[:4] += 0.5
    heavy = rng.standard_cauchy((64, 5))
    cases = [(x, 3), (heavy, 8), (np.round(2 * x) / 2, 3)]
    found = [float(rhat(torch.as_tensor(v), superchains=k)) for v, k in cases]
    assert found == pytest.approx([1.0757938976381654, 1.0206382430662202, 1.0888196236981489])


def test_short_chains_of_one_law_agree_where_the_plain_one_cannot_tell():
    """128 chains of 4 draws each: R-hat of single chains is above 1.02 by chance alone."""
    torch.manual_seed(0)
    draws = torch.randn(128, 4, 3)
    assert (rhat(draws) > 1.02).all() and (rhat(draws, superchains=4) < 1.015).all()
    draws[:32] += 1.0  # the chains from one of the four starting points have not moved enough
    assert (rhat(draws, superchains=4) > 1.06).all()
    with pytest.raises(ValueError, match="superchains=5 must divide the 128"):
        rhat(draws, superchains=5)


def test_independent_chains_exceed_the_limit_twice_in_a_thousand_times():
    torch.manual_seed(0)
    for chains, draws in ((2, 50), (4, 24)):
        found = rhat(torch.randn(chains, draws, 20_000))
        assert float((found > limit_of_rhat(chains, draws)).double().mean()) == pytest.approx(
            2e-3, abs=1e-3
        )
    assert limit_of_rhat(4, 25) == pytest.approx(1.11, abs=5e-3) and limit_of_rhat(4, 3) == np.inf
    assert limit_of_rhat(4, 240) > limit_of_rhat(4, 260) == 1.01

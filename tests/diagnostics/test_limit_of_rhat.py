"""The R-hat above which chains disagree: what independent draws hardly ever exceed."""

import math

import pytest
import torch

from pyro_bdl.diagnostics import rhat
from pyro_bdl.diagnostics.rhat import limit_of_rhat


@pytest.mark.parametrize("draws", [4, 7, 25, 100])
def test_independent_draws_of_any_length_keep_it(draws):
    """1,000 quantities: a share of 2 % has an error of .5 %; .1 % for location and for scale."""
    x = torch.randn(4, draws, 1000, generator=torch.Generator().manual_seed(draws))
    assert (rhat(x, progress=False) > limit_of_rhat(4, draws)).double().mean() < 0.02


def test_long_chains_have_the_published_one_and_too_short_ones_none():
    assert limit_of_rhat(4, 1000) == 1.01 and limit_of_rhat(4, 300) == 1.01
    assert limit_of_rhat(4, 25) == pytest.approx(1.1135, abs=1e-4)
    assert math.isinf(limit_of_rhat(4, 3))


def test_chains_that_disagree_exceed_it():
    x = torch.randn(4, 25, 200, generator=torch.Generator().manual_seed(0))
    apart = x + torch.arange(4.0)[:, None, None]
    assert (rhat(apart, progress=False) > limit_of_rhat(4, 25)).double().mean() > 0.99

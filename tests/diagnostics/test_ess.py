"""R-hat and ESS where ArviZ has no number; parity with it, at 1e-10, is in ``test_arviz.py``."""

import math

import pytest
import torch

from pyro_bdl.diagnostics import convergence, ess, mcse, rhat
from pyro_bdl.diagnostics.rhat import limit_of_rhat


def test_constants_single_chains_and_chains_apart():
    constant = torch.full((4, 10), 0.1, dtype=torch.float64)
    assert torch.isnan(rhat(constant))
    assert ess(constant) == 40
    assert torch.isnan(rhat(torch.randn(1, 20)))
    assert torch.isnan(convergence(torch.randn(1, 20)).rhat)
    stuck = torch.arange(2.0)[:, None].expand(2, 20)
    assert rhat(stuck) > 1e6
    wide = torch.randn(2, 500) * torch.tensor([[1.0], [10.0]])
    assert rhat(wide) > 1.5  # the folded draws tell


def test_a_nan_between_the_halves_counts():
    x = torch.randn(2, 9, dtype=torch.float64)
    x[1, 4] = torch.nan
    for kind, prob in {"bulk": None, "tail": None, "sd": None, "quantile": 0.3}.items():
        assert torch.isnan(ess(x, kind=kind, prob=prob))
    assert all(torch.isnan(value) for value in convergence(x)[1:])
    assert torch.isnan(mcse(x, kind="median"))


def test_one_tail_level_means_both():
    x = torch.randn(4, 100, 3)
    both = ess(x, kind="tail", prob=(0.1, 0.9))
    torch.testing.assert_close(ess(x, kind="tail", prob=0.1), both, rtol=0, atol=0)


@pytest.mark.parametrize("draws", [4, 7, 25, 100])
def test_independent_draws_of_any_length_keep_the_limit_of_rhat(draws):
    """1,000 quantities: a share of 2 % has an error of .5 %; .1 % for location and for scale."""
    x = torch.randn(4, draws, 1000, generator=torch.Generator().manual_seed(draws))
    assert (rhat(x) > limit_of_rhat(4, draws)).double().mean() < 0.02


def test_the_limit_of_rhat_of_long_and_short_chains():
    assert limit_of_rhat(4, 1000) == 1.01 and limit_of_rhat(4, 300) == 1.01
    assert limit_of_rhat(4, 25) == pytest.approx(1.1135, abs=1e-4)
    assert math.isinf(limit_of_rhat(4, 3))
    x = torch.randn(4, 25, 200) + torch.arange(4.0)[:, None, None]
    assert (rhat(x) > limit_of_rhat(4, 25)).double().mean() > 0.99


def test_what_the_draws_are_around_does_not_matter():
    torch.manual_seed(0)
    x = torch.randn(4, 200, dtype=torch.float64)
    for kind in ("mean", "sd", "bulk", "tail"):
        assert ess(x + 50, kind=kind) == pytest.approx(float(ess(x, kind=kind)), rel=1e-6)
    assert mcse(x + 50, kind="sd") == pytest.approx(float(mcse(x, kind="sd")), rel=1e-6)


@pytest.mark.parametrize("kind", ["mean", "sd"])
@pytest.mark.parametrize("unit", [1e-20, 1e-8, 1e8])
def test_units_do_not_matter(kind, unit):
    """Squares of small numbers are no constant."""
    x = torch.randn(4, 300, dtype=torch.float64).cumsum(1)
    assert ess(unit * x, kind=kind) == pytest.approx(float(ess(x, kind=kind)), rel=1e-9)
    assert mcse(unit * x, kind=kind) / unit == pytest.approx(float(mcse(x, kind=kind)), rel=1e-9)

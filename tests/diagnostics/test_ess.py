"""R-hat, ESS, MCSE and BFMI against closed forms; parity with ArviZ is in ``test_arviz.py``."""

import math

import pytest
import torch

from pyro_bdl.diagnostics import bfmi, convergence, ess, mcse, rhat
from pyro_bdl.diagnostics.rhat import limit_of_rhat

CHAINS, DRAWS, QUANTITIES = 4, 10_000, 40


def autoregressive(coefficient):
    """x_t = phi x_t-1 + noise with standard deviation 1: correlation phi^t at lag t."""
    x = torch.randn(CHAINS, DRAWS, QUANTITIES, dtype=torch.float64)
    x[:, 1:] *= math.sqrt(1 - coefficient**2)
    for t in range(1, DRAWS):
        x[:, t] += coefficient * x[:, t - 1]
    return x


def check_mean(value, expected):
    """The mean over the quantities lies within 5 of its standard errors, and 2 % for bias."""
    error = value.std() / math.sqrt(QUANTITIES)
    assert abs(value.mean() - expected) < 5 * error + 0.02 * expected


@pytest.mark.parametrize("phi", [-0.5, 0.0, 0.5, 0.9])
def test_autoregressive_chains(phi):
    """ESS = S (1 - phi) / (1 + phi) for AR(1) chains (Geyer 1992)."""
    x = autoregressive(phi)
    size = CHAINS * DRAWS
    # sum over all lags of phi^|t|, and of phi^2|t|, the correlation of the squares.
    of_mean, of_square = (1 + phi) / (1 - phi), (1 + phi**2) / (1 - phi**2)
    check_mean(ess(x, kind="mean"), size / of_mean)
    check_mean(ess(x, kind="bulk"), size / of_mean)
    check_mean(ess(x, kind="sd"), size / of_square)
    check_mean(mcse(x), math.sqrt(of_mean / size))
    check_mean(mcse(x, kind="sd"), math.sqrt(of_square / size / 2))
    assert rhat(x).max() < 1.01


def test_chains_that_never_meet():
    """Chains far apart: all rho_t = 1 - (W - C_t) / V are near 1, up to the last pair, and
    tau = -1 + 2 sum_{t < 2k} rho_t + rho_{2k} (Vehtari et al. 2021, section 3.2)."""
    x = torch.randn(2, 11, dtype=torch.float64) + torch.tensor([[0.0], [50.0]])
    halves = torch.cat([x[:, :5], x[:, 6:]])
    n, centered = 5, halves - halves.mean(1, keepdim=True)
    lagged = [(centered[:, t:] * centered[:, : n - t]).sum(1).mean() / n for t in range(n)]
    within = lagged[0] * n / (n - 1)
    total = lagged[0] + halves.mean(1).var()
    rho = [1.0, *(float(1 - (within - c) / total) for c in lagged[1:])]
    assert min(rho) > 0.99
    tau = -1 + 2 * sum(rho[:2]) + rho[2]
    torch.testing.assert_close(ess(x, kind="mean").item(), 20 / tau, rtol=1e-3, atol=0)


def test_bfmi():
    """Var(E_t - E_t-1) / Var(E) = 2 (1 - phi). Source: Betancourt 2016, equation 9."""
    found = bfmi(autoregressive(0.9))
    assert found.shape == (CHAINS, QUANTITIES)
    assert abs(found.mean() - 0.2) < 0.01
    energy = torch.tensor([[1.0, 2.0, 4.0, 1.0]])
    torch.testing.assert_close(bfmi(energy), torch.tensor([14 / 3 / 2]).double())


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

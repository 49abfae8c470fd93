"""Parity with ArviZ 1.x at 1e-10: ``arviz_1.x.json`` holds what arviz-stats 1.3.3 (numpy 2.5, scipy
1.18) finds for these inputs by ``rhat``, ``ess``, ``mcse``, ``bfmi``, ``loo``,
``loo_approximate_posterior`` and ``psislw`` (of the sorted log weights every 50th)."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from pyro_bdl import diagnostics as bdl

FILE = Path(__file__).parent / "arviz_1.x.json"
pytestmark = pytest.mark.filterwarnings("ignore")


def autoregressive(rng, chains, draws, quantities, coefficient):
    """x_t = coefficient x_t-1 + noise, from its stationary distribution."""
    noise = rng.standard_normal((chains, draws, quantities))
    x = np.zeros_like(noise)
    x[:, 0] = noise[:, 0] / np.sqrt(1 - coefficient**2)
    for t in range(1, draws):
        x[:, t] = coefficient * x[:, t - 1] + noise[:, t]
    return x


def chain_cases():
    """Name -> (chains, draws, quantities)."""
    rng = np.random.default_rng(0)
    smooth = rng.standard_normal((4, 100, 4))
    with_nan, with_infinity, constant = smooth.copy(), smooth.copy(), smooth.copy()
    with_nan[1, 3, 2] = np.nan
    with_infinity[1, 3, 2] = np.inf
    with_infinity[2, 5, 2] = -np.inf
    with_infinity[0, 7, 3] = np.inf
    constant[..., 1] = 0.5
    return {
        "random": smooth,
        "apart": smooth + 0.3 * np.arange(4)[:, None, None],
        "unequal spread": smooth * (1 + np.arange(4))[:, None, None],
        "slow": autoregressive(rng, 3, 150, 4, 0.95),
        "antithetic": autoregressive(rng, 4, 120, 4, -0.8),
        "heavy tails": rng.standard_cauchy((4, 100, 4)),
        "ties": np.round(smooth * 2) / 2,
        "ties that round": 5 * np.round(smooth * 1.4) / 7,
        "integers": rng.integers(0, 4, (4, 100, 4)).astype(float),
        "two values": rng.integers(0, 2, (2, 50, 4)).astype(float),
        "odd draws": rng.standard_normal((4, 101, 4)),
        "odd ties": np.round(rng.standard_normal((3, 61, 4)) * 2) / 10,
        "one chain": autoregressive(rng, 1, 90, 4, 0.5),
        "one chain, odd": rng.standard_normal((1, 33, 4)),
        "two by five": rng.standard_normal((2, 5, 20)),
        "four draws": rng.standard_normal((2, 4, 20)),
        "six draws": rng.standard_normal((2, 6, 20)),
        "nan": with_nan,
        "infinity": with_infinity,
        "one constant": constant,
    }


def likelihood_cases():
    """Name -> log likelihoods (chains, draws, observations), and the relative efficiency."""
    rng = np.random.default_rng(1)
    smooth = -0.5 * rng.standard_normal((4, 250, 6)) ** 2
    with_nan, with_infinity = smooth.copy(), smooth.copy()
    with_nan[1, 3, 2] = np.nan
    with_infinity[1, 3, 2] = -np.inf
    with_infinity[0, 7, 4] = np.inf
    return {
        "random": (smooth, 1.0),
        "correlated": (autoregressive(rng, 4, 300, 5, 0.7), 0.2),
        "antithetic": (autoregressive(rng, 4, 300, 5, -0.7), 1.9),
        "heavy tails": (-np.abs(rng.standard_cauchy((4, 250, 20))), 0.8),
        "heavier tails": (-rng.pareto(0.7, (2, 500, 20)), 1.0),
        "light tails": (rng.uniform(-1, 0, (4, 250, 6)), 1.0),
        "ties": (np.round(smooth * 4) / 4, 1.0),
        "few values": (-rng.integers(0, 30, (4, 250, 6)).astype(float), 1.0),
        "small spread": (-3.0 + 1e-2 * rng.standard_normal((4, 250, 4)), 1.0),
        "underflow": (-900 * rng.random((4, 250, 4)), 1.0),
        "one chain": (smooth[:1], 1.0),
        "odd draws": (smooth[:3, :101], 0.7),
        "few draws": (smooth[:2, :14], 1.0),
        "nan": (with_nan, 1.0),
        "infinity": (with_infinity, 1.0),
    }


# Name in the file -> (function, options); ArviZ has ``method`` for ``kind``.
STATISTICS = {
    "rhat": ("rhat", {}),
    "bulk": ("ess", {"kind": "bulk"}),
    "tail": ("ess", {"kind": "tail", "prob": (0.05, 0.95)}),
    "tail 20 %": ("ess", {"kind": "tail", "prob": (0.2, 0.8)}),
    "mean": ("ess", {"kind": "mean"}),
    "sd": ("ess", {"kind": "sd"}),
    "median": ("ess", {"kind": "median"}),
    "quantile": ("ess", {"kind": "quantile", "prob": 0.9}),
    "low quantile": ("ess", {"kind": "quantile", "prob": 0.1}),
    "local": ("ess", {"kind": "local", "prob": (0.1, 0.3)}),
    "mcse mean": ("mcse", {"kind": "mean"}),
    "mcse sd": ("mcse", {"kind": "sd"}),
    "mcse median": ("mcse", {"kind": "median"}),
    "mcse quantile": ("mcse", {"kind": "quantile", "prob": 0.9}),
    "bfmi": ("bfmi", {}),
}


def densities(ll):
    """log p and log q (chains, draws) for ``loo_approximate_posterior``."""
    rng = np.random.default_rng(2)
    log_q = -0.5 * rng.standard_normal(ll.shape[:2]) ** 2
    return log_q + 0.3 * rng.standard_normal(ll.shape[:2]), log_q


CHAINS, LIKELIHOODS = chain_cases(), likelihood_cases()


def find(group, case, x):
    """The numbers of the file, which were found for this input."""
    found = json.loads(FILE.read_text())[group][case]
    total = np.nan_to_num(x, posinf=1, neginf=-1).sum()
    np.testing.assert_allclose(total, found["input"], rtol=1e-12)
    return found


@pytest.mark.parametrize("case", CHAINS)
def test_statistics_of_chains(case):
    """R-hat, ESS, MCSE and BFMI (Vehtari et al. 2021) against ArviZ's numbers."""
    x = torch.from_numpy(CHAINS[case])
    found = find("chains", case, CHAINS[case])
    for name, (function, options) in STATISTICS.items():
        value = getattr(bdl, function)(x, **options)
        np.testing.assert_allclose(value.numpy(), found[name], rtol=1e-10, atol=1e-15, err_msg=name)
    for value, name in zip(bdl.convergence(x), ("rhat", "bulk", "tail"), strict=True):
        np.testing.assert_allclose(value.numpy(), found[name], rtol=1e-10)


VANISHING = ("heavy tails", "heavier tails", "infinity")  # ratios that underflow


def infinite(k, case):
    """ArviZ 1.x gives NaN where ratios vanish beside the largest, and also where all are equal:
    here the first have an infinite k-hat."""
    k = np.asarray(k, dtype=float)
    return np.where(np.isnan(k), np.inf, k) if case in VANISHING else k


@pytest.mark.parametrize("case", LIKELIHOODS)
def test_psis(case):
    ll, r_eff = LIKELIHOODS[case]
    found = find("likelihoods", case, ll)
    got = bdl.psis(-torch.from_numpy(ll), r_eff=r_eff)
    expected = infinite(found["psis"]["k"], case)
    np.testing.assert_allclose(got.pareto_k.numpy(), expected, rtol=1e-10)
    weights = np.sort(got.log_weights.flatten(0, 1).T.numpy(), -1)[:, ::-50]
    np.testing.assert_allclose(weights, found["psis"]["weights"], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("case", LIKELIHOODS)
def test_loo(case):
    ll, r_eff = LIKELIHOODS[case]
    found = find("likelihoods", case, ll)
    found["loo"]["pareto_k"] = infinite(found["loo"]["pareto_k"], case)
    same_result(bdl.loo(torch.from_numpy(ll), r_eff=r_eff), found["loo"])


@pytest.mark.parametrize("case", LIKELIHOODS)
def test_loo_of_an_approximate_posterior(case):
    ll, _ = LIKELIHOODS[case]
    found = find("likelihoods", case, ll)
    got = bdl.loo_approximate_posterior(*map(torch.from_numpy, (ll, *densities(ll))))
    found["approximate"]["pareto_k"] = infinite(found["approximate"]["pareto_k"], case)
    same_result(got, found["approximate"])


def same_result(got, found):
    for name, value in found.items():
        mine = getattr(got, name)
        mine = mine.numpy() if isinstance(mine, torch.Tensor) else mine
        np.testing.assert_allclose(mine, value, rtol=1e-10, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("constant", [-1.3, 0.0])
def test_a_constant_log_likelihood_spoils_no_other(constant):
    ll = torch.from_numpy(LIKELIHOODS["random"][0].copy())
    alone = bdl.loo(ll)
    ll[..., 2] = constant
    got = bdl.loo(ll)
    others = [0, 1, 3, 4, 5]
    assert got.pareto_k[2].isnan()
    torch.testing.assert_close(got.pareto_k[others], alone.pareto_k[others], rtol=0, atol=0)
    torch.testing.assert_close(got.pointwise[others], alone.pointwise[others], rtol=0, atol=0)
    # Equal weights are exact for it: nothing is lost by leaving it out.
    assert math.isclose(got.pointwise[2].item(), constant, abs_tol=1e-13)
    assert math.isfinite(got.elpd)

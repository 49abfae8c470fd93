"""Parity with ArviZ 1.x at 1e-10: with numbers frozen from it, and with itself where it is
installed.

``reference.py`` holds the inputs and the calls of ArviZ, and wrote ``arviz_1.x.json``.
"""

import copy
import importlib.util
import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from pyro_bdl import diagnostics as bdl

_spec = importlib.util.spec_from_file_location("reference", Path(__file__).parent / "reference.py")
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)

CHAINS, LIKELIHOODS = reference.chain_cases(), reference.likelihood_cases()
SOURCES = ["frozen", "installed"] if reference.IS_1 else ["frozen"]
pytestmark = pytest.mark.filterwarnings("ignore")


@cache
def expected(source):
    """What ArviZ finds."""
    if source == "installed":
        return reference.by_arviz()
    return json.loads(reference.FILE.read_text())


def find(source, group, case, x):
    found = copy.deepcopy(expected(source)[group][case])
    np.testing.assert_allclose(
        np.nan_to_num(x, posinf=1, neginf=-1).sum(), found["input"], rtol=1e-12
    )
    return found


def ours(name, x):
    function, options = reference.STATISTICS[name]
    options = {"kind" if key == "method" else key: value for key, value in options.items()}
    return getattr(bdl, function)(torch.from_numpy(x), **options)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", reference.STATISTICS)
@pytest.mark.parametrize("case", CHAINS)
def test_statistic_of_chains(case, name, source):
    """R-hat, ESS and MCSE (Vehtari et al. 2021) against ArviZ's numbers."""
    found = find(source, "chains", case, CHAINS[case])
    np.testing.assert_allclose(
        ours(name, CHAINS[case]).numpy(), found[name], rtol=1e-10, atol=1e-15
    )


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", CHAINS)
def test_bfmi(case, source):
    found = find(source, "chains", case, CHAINS[case])
    got = bdl.bfmi(torch.from_numpy(CHAINS[case]))
    np.testing.assert_allclose(got.numpy(), found["bfmi"], rtol=1e-10)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", CHAINS)
def test_joint_function_equals_the_single_ones(case, source):
    found = find(source, "chains", case, CHAINS[case])
    got = bdl.convergence(torch.from_numpy(CHAINS[case]))
    for value, name in zip(got, ("rhat", "bulk", "tail"), strict=True):
        np.testing.assert_allclose(value.numpy(), found[name], rtol=1e-10)


VANISHING = ("heavy tails", "heavier tails", "infinity")  # ratios that underflow


def infinite(k, case):
    """ArviZ 1.x gives NaN where ratios vanish beside the largest, and also where all are equal:
    here the first have an infinite k-hat."""
    k = np.asarray(k, dtype=float)
    return np.where(np.isnan(k), np.inf, k) if case in VANISHING else k


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", LIKELIHOODS)
def test_psis(case, source):
    ll, r_eff = LIKELIHOODS[case]
    found = find(source, "likelihoods", case, ll)
    got = bdl.psis(-torch.from_numpy(ll), r_eff=r_eff)
    expected = infinite(found["psis"]["k"], case)
    np.testing.assert_allclose(got.pareto_k.numpy(), expected, rtol=1e-10)
    weights = np.sort(got.log_weights.flatten(0, 1).T.numpy(), -1)[:, ::-50]
    np.testing.assert_allclose(weights, found["psis"]["weights"], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", LIKELIHOODS)
def test_loo(case, source):
    ll, r_eff = LIKELIHOODS[case]
    found = find(source, "likelihoods", case, ll)
    found["loo"]["pareto_k"] = infinite(found["loo"]["pareto_k"], case)
    same_result(bdl.loo(torch.from_numpy(ll), r_eff=r_eff), found["loo"])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", LIKELIHOODS)
def test_loo_of_an_approximate_posterior(case, source):
    ll, _ = LIKELIHOODS[case]
    found = find(source, "likelihoods", case, ll)
    densities = map(torch.from_numpy, reference.densities(ll))
    got = bdl.loo_approximate_posterior(torch.from_numpy(ll), *densities)
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

"""What the diagnostics refuse, and in which words."""

import math

import numpy as np
import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl.diagnostics import (
    bfmi,
    convergence,
    ess,
    explain_chains,
    function_draws,
    loo,
    loo_approximate_posterior,
    mcse,
    psis,
    rhat,
    summary,
    within_ess,
    within_rhat,
)

LL, P = torch.randn(4, 100, 3), torch.randn(4, 100)
DRAWS = (bfmi, convergence, ess, loo, mcse, psis, rhat, within_ess, within_rhat)
ONE = bdl.Samples({"weight": torch.randn(1, 50, 1, 1), "bias": torch.randn(1, 50, 1)})


def model(x, y=None):
    return bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)(x, y)


REFUSALS = [
    *(
        (lambda f=f, draws=draws: f(draws), error, words)
        for f in DRAWS
        for draws, error, words in (
            (torch.randn(10), ValueError, r"shape \(10,\)"),
            (torch.randn(4, 3, 2), ValueError, "4 draws"),
            (np.zeros((4, 10)), TypeError, "ndarray"),
            (torch.zeros(4, 10, dtype=torch.complex64), TypeError, "real"),
        )
    ),
    (lambda: ess(P, kind="middle"), ValueError, "'bulk', 'tail'"),
    (lambda: ess(P, kind="mean", prob=0.1), ValueError, "takes no prob"),
    (lambda: ess(P, kind="quantile", prob=1.2), ValueError, "needs a level between 0 and 1"),
    (lambda: ess(P, kind="local", prob=0.1), ValueError, "needs two levels"),
    (lambda: mcse(P, kind="bulk"), ValueError, "'mean', 'sd'"),
    (lambda: mcse(P, kind="quantile", prob=-0.1), ValueError, "prob must lie between 0 and 1"),
    (lambda: loo_approximate_posterior(LL, P, P[:2]), ValueError, "log_q must have"),
    (lambda: loo_approximate_posterior(LL, P.numpy(), P), TypeError, "log_p must be a t"),
    (lambda: loo(LL, r_eff=0), ValueError, "the ESS over S, must be positive"),
    (lambda: psis(P, r_eff=math.inf), ValueError, "the ESS over S, must be positive"),
    (lambda: summary({"a": P, "b": P[:2]}), ValueError, r"got .*'b': \(2, 100\)"),
    (lambda: summary({}), ValueError, "no site"),
    (lambda: summary({"w": P[:, :3]}), ValueError, "site 'w' has shape"),
    (lambda: summary({"w": [1.0]}), TypeError, "site 'w' must be a tensor"),
    (lambda: explain_chains(model, ONE, torch.zeros(3, 1)), ValueError, "at least two"),
    (
        lambda: function_draws(model, bdl.guides.AutoMeanField(model), torch.zeros(3, 1)),
        TypeError,
        "samples must be Samples, got AutoMeanField",
    ),
]


@pytest.mark.parametrize("call, error, words", REFUSALS)
def test_refusals(call, error, words):
    with pytest.raises(error, match=words):
        call()

"""Statistics of ArviZ 1.x on inputs with and without difficulties, live or frozen in a file.

``python tests/diagnostics/reference.py`` writes the numbers of an installed ArviZ 1.x to
``arviz_1.x.json`` beside it, so that its conventions are tested wherever 0.23 is installed. Made
with arviz-stats 1.3.3 (numpy 2.5, scipy 1.18).
"""

import json
import logging
import warnings
from pathlib import Path

import arviz
import numpy as np

IS_1 = not arviz.__version__.startswith("0.")
FILE = Path(__file__).parent / "arviz_1.x.json"


# ---------------------------------------------------------------------------------- the inputs


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


# -------------------------------------------------------------------------------------- ArviZ

# Name -> (function, options); the same names in pyro_bdl.diagnostics take the same options, but
# for ArviZ's ``method``, which is ``kind`` there.
STATISTICS = {
    "rhat": ("rhat", {}),
    "bulk": ("ess", {"method": "bulk"}),
    "tail": ("ess", {"method": "tail", "prob": (0.05, 0.95)}),
    "tail 20 %": ("ess", {"method": "tail", "prob": (0.2, 0.8)}),
    "mean": ("ess", {"method": "mean"}),
    "sd": ("ess", {"method": "sd"}),
    "median": ("ess", {"method": "median"}),
    "quantile": ("ess", {"method": "quantile", "prob": 0.9}),
    "low quantile": ("ess", {"method": "quantile", "prob": 0.1}),
    "local": ("ess", {"method": "local", "prob": (0.1, 0.3)}),
    "mcse mean": ("mcse", {"method": "mean"}),
    "mcse sd": ("mcse", {"method": "sd"}),
    "mcse median": ("mcse", {"method": "median"}),
    "mcse quantile": ("mcse", {"method": "quantile", "prob": 0.9}),
}


def chain_statistic(name, x):
    """One number for each quantity."""
    function, options = STATISTICS[name]
    columns = [getattr(arviz, function)(x[..., i], **options) for i in range(x.shape[-1])]
    return np.array(columns, dtype=float)


def bfmi(x):
    """(chains, quantities)"""
    from arviz_stats.base import array_stats

    columns = [array_stats.bfmi(x[..., i], chain_axis=0, draw_axis=1) for i in range(x.shape[-1])]
    return np.stack(columns, -1)


def psis(log_ratios, r_eff):
    """Log weights (observations, S) and k-hat of log ratios (observations, S)."""
    from arviz_stats.base import array_stats

    return array_stats.psislw(-log_ratios, r_eff=r_eff)


def loo(ll, r_eff):
    result = arviz.loo(_data(ll), reff=r_eff, pointwise=True)
    return _of_result(result) | {"good_k": float(result.good_k)}


def _of_result(result):
    return {
        "elpd": float(result.elpd),
        "se": float(result.se),
        "p_loo": float(result.p),
        "pointwise": np.asarray(result.elpd_i),
        "pareto_k": np.asarray(result.pareto_k),
    }


def loo_approximate_posterior(ll, log_p, log_q):
    return _of_result(arviz.loo_approximate_posterior(_data(ll), log_p, log_q, pointwise=True))


def densities(ll):
    """log p and log q (chains, draws) for ``loo_approximate_posterior``."""
    rng = np.random.default_rng(2)
    log_q = -0.5 * rng.standard_normal(ll.shape[:2]) ** 2
    return log_q + 0.3 * rng.standard_normal(ll.shape[:2]), log_q


def _data(ll):
    groups = {"posterior": {"w": np.zeros(ll.shape[:2])}, "log_likelihood": {"y": ll}}
    return arviz.from_dict(groups)


# ------------------------------------------------------------------------------------ the file


def by_arviz():
    """Everything above for the installed ArviZ, as lists; an error of ArviZ's is left out."""
    logging.getLogger("arviz").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chains = {
            case: {name: chain_statistic(name, x).tolist() for name in STATISTICS}
            | {"bfmi": bfmi(x).tolist(), "input": np.nan_to_num(x, posinf=1, neginf=-1).sum()}
            for case, x in chain_cases().items()
        }
        likelihoods = {
            case: _of_likelihood(ll, r_eff) for case, (ll, r_eff) in likelihood_cases().items()
        }
    return {"chains": chains, "likelihoods": likelihoods}


def _of_likelihood(ll, r_eff):
    found = {"input": np.nan_to_num(ll, posinf=1, neginf=-1).sum()}
    for name, make in {
        "loo": lambda: loo(ll, r_eff),
        "approximate": lambda: loo_approximate_posterior(ll, *densities(ll)),
        "psis": lambda: _of_psis(ll, r_eff),
    }.items():
        try:
            result = make()
        except (ValueError, AttributeError):  # too few or equal draws
            continue
        found[name] = {key: np.asarray(value).tolist() for key, value in result.items()}
    return found


def _of_psis(ll, r_eff):
    """k-hat and, of the sorted log weights, every 50th."""
    weights, k = psis(-ll.reshape(-1, ll.shape[-1]).T.copy(), r_eff)
    return {"k": k, "weights": np.sort(weights, -1)[:, ::-50]}


if __name__ == "__main__":
    FILE.write_text(json.dumps(by_arviz(), indent=0) + "\n")
    print(f"{FILE}: ArviZ {arviz.__version__}")

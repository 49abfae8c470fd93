"""The Pyro programs of ``benchmarks/posteriordb.py`` have the log densities of the Stan programs.

Data are simulated; each density is written out with scipy, up to the constants that Stan drops.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pyro import poutine
from pyro.infer.mcmc.util import TraceEinsumEvaluator
from scipy import stats
from scipy.special import logsumexp

import pyro_bdl as bdl

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from posteriordb_programs import POSTERIORS

N = 8
RNG = np.random.default_rng(0)


pytestmark = pytest.mark.usefixtures("double")


def some(*shape):
    return RNG.normal(size=shape).round(2).tolist()


REGRESSION = {"y": some(N), "X": some(N, 3)}
KIDS = {"kid_score": some(N), "mom_iq": some(N), "mom_hs": [0, 1] * (N // 2)}
BUSHES = ("diam1", "diam2", "canopy_height", "total_height", "density", "group")
VOTES = ("real_ideo", "race_adj", "educ1", "gender", "income", "partyid7")
DATA = {
    "arK-arK": {"K": 2, "y": some(N)},
    "diamonds-diamonds": {"Y": some(N), "X": some(N, 4)},
    "earnings-earn_height": {"earn": some(N), "height": some(N)},
    "eight_schools-eight_schools_centered": {"y": some(N), "sigma": [1.5] * N},
    "eight_schools-eight_schools_noncentered": {"y": some(N), "sigma": [1.5] * N},
    "gp_pois_regr-gp_regr": {"x": some(N), "y": some(N)},
    "kidiq-kidscore_interaction": KIDS,
    "kidiq-kidscore_momiq": KIDS,
    "mesquite-mesquite": {name: some(N) for name in (*BUSHES, "weight")},
    "nes1980-nes": {name: some(N) for name in VOTES} | {"age_discrete": [1, 2, 3, 4] * (N // 4)},
    "sblrc-blr": REGRESSION,
    "sblri-blr": REGRESSION,
}


def normal(value, mean=0.0, scale=1.0):
    return stats.norm.logpdf(value, mean, scale).sum()


def half_cauchy(value, scale):
    return stats.halfcauchy.logpdf(value, scale=scale)


def rows(d, *names):
    return np.stack([np.ones(N), *(np.array(d[name]) for name in names)], 1)


def ark(d, p):
    y, beta = np.array(d["y"]), p["beta"]
    means = [
        p["alpha"] + sum(b * y[t - k - 1] for k, b in enumerate(beta)) for t in range(2, len(y))
    ]
    prior = normal(p["alpha"], 0, 10) + normal(beta, 0, 10) + half_cauchy(p["sigma"], 2.5)
    return prior + normal(y[2:], means, p["sigma"])


def diamonds(d, p):
    x = np.array(d["X"])[:, 1:]
    mean = p["Intercept"] + (x - x.mean(0)) @ p["b"]
    prior = normal(p["b"]) + stats.t.logpdf(p["Intercept"], 3, 8, 10)
    prior += stats.t.logpdf(p["sigma"], 3, 0, 10) - stats.t.logsf(0, 3, 0, 10)
    return prior + normal(d["Y"], mean, p["sigma"])


def interaction(d, p):
    hs, iq = np.array(d["mom_hs"]), np.array(d["mom_iq"])
    b = p["beta"]
    mean = b[0] + b[1] * hs + b[2] * iq + b[3] * hs * iq
    return half_cauchy(p["sigma"], 2.5) + normal(d["kid_score"], mean, p["sigma"])


def momiq(d, p):
    mean = rows(d, "mom_iq") @ p["beta"]
    return half_cauchy(p["sigma"], 2.5) + normal(d["kid_score"], mean, p["sigma"])


def nes(d, p):
    age, b = np.array(d["age_discrete"]), p["beta"]
    mean = b[0] + b[1] * np.array(d["real_ideo"]) + b[2] * np.array(d["race_adj"])
    mean = mean + b[3] * (age == 2) + b[4] * (age == 3) + b[5] * (age == 4)
    mean = mean + rows(d, "educ1", "gender", "income")[:, 1:] @ b[6:]
    return normal(d["partyid7"], mean, p["sigma"])


def centered(d, p):
    prior = half_cauchy(p["tau"], 5) + normal(p["mu"], 0, 5) + normal(p["theta"], p["mu"], p["tau"])
    return prior + normal(d["y"], p["theta"], d["sigma"])


def noncentered(d, p):
    prior = half_cauchy(p["tau"], 5) + normal(p["mu"], 0, 5) + normal(p["theta_trans"])
    return prior + normal(d["y"], p["theta_trans"] * p["tau"] + p["mu"], d["sigma"])


def gp(d, p):
    x = np.array(d["x"])
    covariance = p["alpha"] ** 2 * np.exp(-0.5 * ((x[:, None] - x) / p["rho"]) ** 2)
    covariance += p["sigma"] * np.eye(N)
    prior = stats.gamma.logpdf(p["rho"], 25, scale=1 / 4)
    prior += stats.halfnorm.logpdf(p["alpha"], scale=2) + stats.halfnorm.logpdf(p["sigma"])
    return prior + stats.multivariate_normal.logpdf(d["y"], np.zeros(N), covariance)


def blr(d, p):
    prior = normal(p["beta"], 0, 10) + stats.halfnorm.logpdf(p["sigma"], scale=10)
    return prior + normal(d["y"], np.array(d["X"]) @ p["beta"], p["sigma"])


DENSITIES = {
    "arK-arK": ark,
    "diamonds-diamonds": diamonds,
    "earnings-earn_height": lambda d, p: normal(
        d["earn"], rows(d, "height") @ p["beta"], p["sigma"]
    ),
    "eight_schools-eight_schools_centered": centered,
    "eight_schools-eight_schools_noncentered": noncentered,
    "gp_pois_regr-gp_regr": gp,
    "kidiq-kidscore_interaction": interaction,
    "kidiq-kidscore_momiq": momiq,
    "mesquite-mesquite": lambda d, p: normal(d["weight"], rows(d, *BUSHES) @ p["beta"], p["sigma"]),
    "nes1980-nes": nes,
    "sblrc-blr": blr,
    "sblri-blr": blr,
}


@pytest.mark.parametrize("name", DENSITIES)
def test_log_density(name):
    program = bdl.Program(POSTERIORS[name].program, *POSTERIORS[name].read(DATA[name]))
    latents = program.constrain(torch.linspace(-0.4, 0.6, program.size))[0]
    point = {site: value.numpy() for site, value in latents.items()}
    expected = DENSITIES[name](DATA[name], point)
    assert program.log_joint(latents).item() == pytest.approx(float(expected), rel=1e-12)


def test_schools_without_a_center():
    mu, tau, z = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.ones(1, 2, 8)
    found = POSTERIORS["eight_schools-eight_schools_noncentered"].derived(
        {"mu": mu, "tau": tau, "theta_trans": z}
    )
    assert torch.equal(found["theta"], torch.tensor([4.0, 6.0])[None, :, None].expand(1, 2, 8))


def summed_out(program, args, latents, max_plate_nesting):
    """The log density of a program with its discrete sites summed out by Pyro."""
    enumerated = poutine.enum(
        poutine.condition(program, latents), first_available_dim=-1 - max_plate_nesting
    )
    trace = poutine.trace(enumerated).get_trace(*args)
    return TraceEinsumEvaluator(trace, True, max_plate_nesting).log_prob(trace).item()


def test_mixture_with_its_components_summed_out():
    posterior = POSTERIORS["low_dim_gauss_mix-low_dim_gauss_mix"]
    y, mu, sigma, theta = some(N), np.array([-0.5, 0.7]), np.array([0.8, 1.2]), 0.3
    parts = stats.norm.logpdf(np.array(y)[:, None], mu, sigma) + np.log([theta, 1 - theta])
    expected = normal(mu, 0, 2) + stats.halfnorm.logpdf(sigma, scale=2).sum()
    expected += stats.beta.logpdf(theta, 5, 5) + logsumexp(parts, 1).sum()
    latents = {"mu": mu, "sigma": sigma, "theta": theta}
    latents = {site: torch.as_tensor(value) for site, value in latents.items()}
    found = summed_out(posterior.program, posterior.read({"y": y}), latents, 1)
    assert found == pytest.approx(expected, rel=1e-12)


def test_hidden_markov_chain_with_its_states_summed_out():
    posterior = POSTERIORS["hmm_example-hmm_example"]
    y, mu = np.array(some(5)) + 2.0, np.array([2.5, 4.0])
    theta = np.array([[0.7, 0.3], [0.2, 0.8]])
    density = stats.norm.pdf(y[:, None], mu, 1.0)
    forward = density[0] / 2  # the uniform first state, a constant beside Stan's
    for row in density[1:]:
        forward = (forward @ theta) * row
    expected = normal(mu, np.array([3.0, 10.0])) + np.log(forward.sum())
    latents = {"mu": mu, "theta1": theta[0], "theta2": theta[1]}
    latents = {site: torch.as_tensor(value) for site, value in latents.items()}
    found = summed_out(posterior.program, posterior.read({"y": y.tolist()}), latents, 0)
    assert found == pytest.approx(expected, rel=1e-12)

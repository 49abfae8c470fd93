"""Power-scaling sensitivity against its closed form in a conjugate program, and ArviZ 1.x."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

import pyro_bdl as bdl
from pyro_bdl.diagnostics import prior_sensitivity
from pyro_bdl.diagnostics.sensitivity import diagnosis

N, NOISE = 20, 1.0


def mean_of_normal(prior_mean, prior_sd):
    def program(y=None):
        mu = pyro.sample("mu", dist.Normal(torch.tensor(prior_mean).double(), prior_sd))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(mu, NOISE), obs=y)

    return program


def posterior(y, prior_mean, prior_sd, *, of_prior=1.0, of_data=1.0):
    """The posterior with the prior and the likelihood raised to powers."""
    precision = of_prior / prior_sd**2 + of_data * N / NOISE**2
    mean = (of_prior * prior_mean / prior_sd**2 + of_data * y.sum().item() / NOISE**2) / precision
    return stats.norm(mean, precision**-0.5)


def distance(p, q):
    """The cumulative Jensen-Shannon distance by quadrature, over its bound."""
    ends = [law.ppf(level) for law in (p, q) for level in (1e-9, 1 - 1e-9)]
    grid = np.linspace(min(ends), max(ends), 20001)
    # beyond the draws the bound would grow without end: they end at their own quantiles
    values = []
    for a, b in ((p.cdf(grid), q.cdf(grid)), (p.sf(grid), q.sf(grid))):
        middle = (a + b) / 2
        entropy = a * np.log2(a / middle) + b * np.log2(b / middle)
        values.append((np.trapezoid(entropy, grid), grid, a + b))
    return values


@pytest.mark.parametrize(("prior_mean", "prior_sd"), [(0.0, 10.0), (0.0, 0.3), (4.0, 0.3)])
def test_closed_form_of_a_conjugate_program(prior_mean, prior_sd):
    torch.manual_seed(0)
    y = (1.0 + torch.randn(N)).double()
    program, law = mean_of_normal(prior_mean, prior_sd), posterior(y, prior_mean, prior_sd)
    size = 40_000
    draws = law.ppf((np.arange(size) + 0.5) / size)
    mixed = torch.as_tensor(draws)[torch.randperm(size)].reshape(4, -1)
    found = prior_sensitivity(program, bdl.Samples({"mu": mixed}), y).loc["mu"]
    for part, power in (("prior", "of_prior"), ("likelihood", "of_data")):
        slopes = []
        for alpha in (0.99, 1.01):
            scaled = posterior(y, prior_mean, prior_sd, **{power: alpha})
            sides = []
            for entropy, grid, total in distance(law, scaled):
                inside = (grid >= draws[0]) & (grid <= draws[-1])
                sides.append((entropy / np.trapezoid(total * inside, grid)) ** 0.5)
            slopes.append(max(sides) / abs(np.log2(alpha)))
        assert found[part] == pytest.approx(np.mean(slopes), rel=0.02, abs=2e-4)
        assert 0 <= found[f"{part}_se"] < 0.1 * found[part] + 1e-3
    expected = {10.0: ""}.get(prior_sd, "prior and data may be in conflict")
    assert prior_sd == 10.0 or prior_mean == 0.0 or found["diagnosis"] == expected
    assert prior_sd != 10.0 or found["diagnosis"] == ""


@pytest.mark.parametrize(
    "prior, likelihood, said",
    [
        ((0.2, 0.01), (0.2, 0.01), "prior and data may be in conflict"),
        ((0.2, 0.01), (0.02, 0.01), "strong prior or weak data"),
        ((0.2, 0.01), (0.06, 0.01), "depends on the prior"),  # the data may move it, or not
        ((0.2, 0.01), (0.04, 0.01), "depends on the prior"),
        ((0.08, 0.02), (0.2, 0.01), ""),
        ((0.02, 0.01), (0.2, 0.01), ""),
    ],
)
def test_a_diagnosis_is_beyond_two_errors(prior, likelihood, said):
    assert diagnosis([*prior, *likelihood], 2.0) == said


def test_values_of_arviz():
    """``psense_summary`` of arviz-stats 1.3.3 for these draws; it smooths both tails of weights."""
    rng = np.random.default_rng(5)
    y = rng.normal(1.0, 1.0, N)
    precision = 1 / 0.5**2 + N
    mean = (2.5 / 0.5**2 + y.sum()) / precision
    mu = torch.as_tensor(mean + precision**-0.5 * rng.standard_normal((4, 500)))
    samples = bdl.Samples({"mu": mu})
    program, y = mean_of_normal(2.5, 0.5), torch.as_tensor(y)
    found = prior_sensitivity(program, samples, y, functions={"e": mu.exp()})
    assert list(found.index) == ["mu", "e"]
    assert found["prior"].to_list() == pytest.approx([0.190428, 0.198032], rel=0.01)
    assert found["likelihood"].to_list() == pytest.approx([0.215721, 0.277045], rel=0.01)
    assert (found["diagnosis"] == "prior and data may be in conflict").all()


def test_errors_are_the_spread_over_sets_of_draws():
    torch.manual_seed(0)
    y = (1.0 + torch.randn(N)).double()
    program, law = mean_of_normal(0.0, 0.3), posterior(y, 0.0, 0.3)
    rows = []
    for seed in range(40):
        mu = torch.as_tensor(law.rvs((4, 100), random_state=seed))
        rows.append(prior_sensitivity(program, bdl.Samples({"mu": mu}), y).loc["mu"])
    for part in ("prior", "likelihood"):
        spread = np.std([row[part] for row in rows])
        assert np.mean([row[f"{part}_se"] for row in rows]) == pytest.approx(spread, rel=0.35)


def hierarchy(y=None):
    tau = pyro.sample("tau", dist.HalfNormal(torch.tensor(1.0).double()))
    theta = pyro.sample("theta", dist.Normal(torch.zeros(3).double(), tau).to_event(1))
    with pyro.plate("data", 3):
        pyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def test_the_prior_of_some_sites_and_refusals():
    torch.manual_seed(0)
    y = torch.tensor([0.5, -1.0, 2.0]).double()
    tau = torch.rand(2, 200).double() + 0.5
    samples = bdl.Samples({"tau": tau, "theta": torch.randn(2, 200, 3).double()})
    both = prior_sensitivity(hierarchy, samples, y, prior="*")
    assert list(both.index) == ["tau", "theta[0]", "theta[1]", "theta[2]"]
    top = prior_sensitivity(hierarchy, samples, y, prior="tau", sites="tau")
    assert list(top.index) == ["tau"] and top.loc["tau", "prior"] != both.loc["tau", "prior"]
    torch.testing.assert_close(top.loc["tau", "likelihood"], both.loc["tau", "likelihood"])
    by_default = prior_sensitivity(hierarchy, samples, y)  # theta's prior is of tau
    torch.testing.assert_close(by_default.loc["tau", "prior"], top.loc["tau", "prior"])
    few = prior_sensitivity(
        hierarchy, bdl.Samples({k: v[:, :8] for k, v in samples.latents.items()}), y
    )
    assert few["prior_se"].isna().all() and (few["diagnosis"] == "").all()
    with_far = tau.clone()
    with_far[0, 0] = 200.0  # 0.01 log p differs by hundreds: one draw has all the weight
    far = prior_sensitivity(hierarchy, bdl.Samples({**samples.latents, "tau": with_far}), y)
    assert far["prior"].isna().all() and far["likelihood"].notna().all()
    with pytest.raises(ValueError, match="prior='sigma' matches no site"):
        prior_sensitivity(hierarchy, samples, y, prior="sigma")
    with pytest.raises(ValueError, match="matches no site; there are: tau, theta"):
        prior_sensitivity(hierarchy, samples, y, sites="sigma")
    guide = bdl.guides.AutoMeanField(hierarchy).prototype(y)
    with pytest.raises(TypeError, match="from chains, got AutoMeanField"):
        prior_sensitivity(hierarchy, guide, y)

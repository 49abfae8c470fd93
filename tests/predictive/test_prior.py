"""Draws of the prior: of the program's own laws, all at once, before any fit."""

import math
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

import pyro_bdl as bdl
from pyro_bdl.errors import UnsupportedProgramError

X = torch.linspace(-1, 1, 3)


def hierarchy(x, y=None):
    """Scales whose priors vmap has no operators for, one of which depends on another."""
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    inner = pyro.sample("inner", dist.HalfCauchy(tau))
    share = pyro.sample("share", dist.Beta(2.0, 5.0))
    with pyro.plate("groups", 3):
        pyro.sample("level", dist.StudentT(4.0, 0.0, inner))
    factor = pyro.sample("factor", dist.LKJCholesky(3, 2.0))
    mean = pyro.deterministic("mean", share * x + factor[2, 0])
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(mean, 0.1), obs=y)


def _ks(values, law):
    return stats.kstest(values.numpy(), law).pvalue


def test_a_hierarchy_is_drawn_at_once_from_its_laws():
    with warnings.catch_warnings():
        warnings.simplefilter("error", bdl.errors.BdlWarning)
        draws = bdl.prior_predictive(hierarchy, X, num_samples=3000)
    assert set(draws) == {"tau", "inner", "share", "level", "factor", "mean", "y"}
    assert draws["level"].shape == (3000, 3) and draws["y"].shape == (3000, 3)
    assert _ks(draws["tau"], stats.halfcauchy.cdf) > 1e-4
    assert _ks(draws["share"], stats.beta(2, 5).cdf) > 1e-4
    assert _ks(draws["inner"] / draws["tau"], stats.halfcauchy.cdf) > 1e-4
    assert _ks(draws["level"][:, 1] / draws["inner"], stats.t(4).cdf) > 1e-4
    correlation = (draws["factor"] @ draws["factor"].mT)[:, 2, 1]
    assert _ks((correlation + 1) / 2, stats.beta(2.5, 2.5).cdf) > 1e-4
    mean = draws["share"][:, None] * X + draws["factor"][:, 2, 0, None]
    torch.testing.assert_close(draws["mean"], mean)
    assert _ks((draws["y"][:, 0] - mean[:, 0]) / 0.1, stats.norm.cdf) > 1e-4


def test_a_network():
    net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    model = bdl.models.Regression(bdl.bayesianize(net, prior=bdl.priors.Normal(1.0)), noise=0.1)
    draws = bdl.prior_predictive(model, X[:, None], num_samples=4000)
    again = bdl.prior_predictive(model, X[:, None], num_samples=4000)
    with_targets = bdl.prior_predictive(model, X[:, None], X, num_samples=4000)
    assert torch.equal(draws["y"], again["y"])
    assert stats.ks_2samp(draws["y"][:, 0], with_targets["y"][:, 0]).pvalue > 1e-4
    nodes, weights = map(torch.as_tensor, np.polynomial.hermite_e.hermegauss(60))
    weights = weights / weights.sum()
    for i, x in enumerate(X.double()):  # tanh(w x + b) with w x + b ~ Normal(0, x^2 + 1)
        square = (weights * (nodes * (1 + x * x).sqrt()).tanh().square()).sum()
        sd = (1 + 4 * square).sqrt()
        assert draws["f"][:, i].std().item() == pytest.approx(sd.item(), rel=5 / 8000**0.5)


@pytest.mark.parametrize("targets", [False, True])
@pytest.mark.parametrize("law", ["counts", "classes", "yes or no", "mixture"])
def test_discrete_targets_need_not_be_passed(law, targets):
    """Draws before any fit: y of a distribution that cannot be summed out, and of one that can."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 0.5))
        f = pyro.deterministic("f", w + 0 * x)
        with pyro.plate("data", len(x)):
            if law == "mixture":
                f = f + pyro.sample("z", dist.Bernoulli(0.3))
            if law in ("counts", "mixture"):
                return pyro.sample("y", dist.Poisson(f.exp()), obs=y)
            if law == "classes":
                logits = torch.stack([f, -f], -1)
                return pyro.sample("y", dist.Categorical(logits=logits), obs=y)
            return pyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    given = (torch.zeros(3),) if targets else ()
    draws = bdl.prior_predictive(model, X, *given, num_samples=4000)
    latents = {"w", "z"} if law == "mixture" else {"w"}
    assert set(draws) == {"f", "y"} | latents and draws["y"].shape == (4000, 3)
    mean = {"counts": math.exp(0.125), "mixture": math.exp(0.125) * (0.7 + 0.3 * math.e)}
    assert draws["y"][:, 0].double().mean().item() == pytest.approx(mean.get(law, 0.5), abs=0.12)


def test_a_factor_of_latents_beside_discrete_targets():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        bdl.priors.factor("order", -w.square())
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Poisson((w * x).exp()), obs=y)

    for given in ((), (torch.zeros(3),)):
        with pytest.raises(UnsupportedProgramError, match="the factor 'order' weighs"):
            bdl.prior_predictive(model, X, *given)


def test_a_law_that_vmap_cannot_draw_is_named():
    def model(x):
        angle = pyro.sample("angle", dist.VonMises(0.0, 1.0))
        pyro.deterministic("f", angle * x)

    with pytest.warns(
        bdl.errors.BdlWarning,
        match="^the draw of the site 'angle', VonMises, cannot be vectorized over draws",
    ):
        draws = bdl.prior_predictive(model, X, num_samples=5)
    assert draws["f"].shape == (5, 3)


def test_a_prior_that_cannot_be_sampled():
    def weighed(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        bdl.priors.factor("order", -w.square())
        pyro.deterministic("f", w * x)

    def improper(x):
        w = pyro.sample("w", dist.ImproperUniform(dist.constraints.real, (), ()))
        pyro.deterministic("f", w * x)

    for model, reason in ((weighed, "the factor 'order' weighs"), (improper, "")):
        with pytest.raises(UnsupportedProgramError, match=f"the prior cannot be sampled: {reason}"):
            bdl.prior_predictive(model, X)
    with pytest.raises(ValueError, match="num_samples"):
        bdl.prior_predictive(hierarchy, X, num_samples=0)


@pytest.mark.parametrize("numbers", [(), (2,)], ids=["a scalar", "a vector"])
@pytest.mark.parametrize("seen", [False, True, "all", "none"])
def test_a_prior_under_a_mask(numbers, seen):
    """A latent that a mask leaves without a density cannot be drawn."""
    masks = {"all": torch.tensor(True), "none": torch.tensor(False)}

    def model(x):
        prior = dist.Normal(torch.full(numbers, 3.0), 0.1).mask(masks.get(seen, seen))
        w = pyro.sample("w", prior.to_event(len(numbers)))
        pyro.deterministic("f", w.sum() * x)

    if seen in (True, "all"):
        draws = bdl.prior_predictive(model, X, num_samples=50)["w"]
        assert draws.mean().item() == pytest.approx(3.0, abs=0.1)
        return
    with pytest.raises(UnsupportedProgramError, match=r"a mask leaves .*'w' without a density"):
        bdl.prior_predictive(model, X)

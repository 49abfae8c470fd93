"""log q of Pyro's own guides, by hand, in ``to_arviz``, leave-one-out and importance ratios."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from torch.distributions.transforms import StickBreakingTransform

import pyro_bdl as bdl
from pyro_bdl import importance
from pyro_bdl.comparison.kind import observed
from pyro_bdl.comparison.leave_one_out import CORRECTED, leave_one_out
from pyro_bdl.diagnostics import loo_approximate_posterior
from pyro_bdl.guides.draws import log_densities_of, to_samples

X = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64)
Y = torch.tensor([0.1, -0.3, 0.2, 0.5, 0.4, 0.9], dtype=torch.float64)


@pytest.fixture(autouse=True)
def _double(_fresh):
    torch.set_default_dtype(torch.float64)


def model(x, y=None):
    """Sites on R^2, on the positive numbers and on a simplex: 2 + 1 + 2 unconstrained numbers."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    s = pyro.sample("s", dist.LogNormal(0.0, 0.5))
    p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w[0] + w[1] * x + p[0], s), obs=y)


def unconstrained(draws):
    """The numbers of all sites, (S, 5), and log |dw/du| (S,)."""
    sticks = StickBreakingTransform()
    p = sticks.inv(draws["p"])
    u = torch.cat([draws["w"], draws["s"].log()[:, None], p], 1)
    return u, draws["s"].log() + sticks.log_abs_det_jacobian(p, draws["p"])


def listed(program):
    guide = AutoGuideList(program)
    guide.append(AutoNormal(pyro.poutine.block(program, expose=["w", "s"])))
    guide.append(AutoMultivariateNormal(pyro.poutine.block(program, expose=["p"])))
    return guide


def by_hand(x, y=None):
    pyro.sample("w", dist.Normal(torch.zeros(2), 0.5).to_event(1))
    pyro.sample("s", dist.LogNormal(-0.5, 0.3))
    pyro.sample("p", dist.Dirichlet(torch.tensor([2.0, 1.0, 3.0])))


def _joint_normal(guide, u):
    return guide.get_posterior(X, Y).log_prob(u)


def _of_blocks(locs, scales, u):
    order = ("w", "s", "p")
    loc = torch.cat([getattr(locs, name).reshape(-1) for name in order])
    scale = torch.cat([getattr(scales, name).reshape(-1) for name in order])
    return dist.Normal(loc, scale).log_prob(u).sum(-1)


def _listed_density(guide, u):
    first, second = guide[0], guide[1]
    loc = torch.cat([getattr(first.locs, name).reshape(-1) for name in "ws"])
    scale = torch.cat([getattr(first.scales, name).reshape(-1) for name in "ws"])
    p = second.get_posterior().log_prob(u[:, 3:])
    return dist.Normal(loc, scale).log_prob(u[:, :3]).sum(-1) + p


def _by_hand_density(guide, u):
    sticks = StickBreakingTransform()
    p = sticks(u[:, 3:])
    return (
        dist.Normal(0.0, 0.5).log_prob(u[:, :2]).sum(-1)
        + dist.Normal(-0.5, 0.3).log_prob(u[:, 2])
        + dist.Dirichlet(torch.tensor([2.0, 1.0, 3.0])).log_prob(p)
        + sticks.log_abs_det_jacobian(u[:, 3:], p)
    )


GUIDES = {
    "AutoNormal": (AutoNormal, lambda guide, u: _of_blocks(guide.locs, guide.scales, u)),
    "AutoDiagonalNormal": (AutoDiagonalNormal, _joint_normal),
    "AutoMultivariateNormal": (AutoMultivariateNormal, _joint_normal),
    "AutoLowRank": (AutoLowRankMultivariateNormal, _joint_normal),
    "AutoGuideList": (listed, _listed_density),
    "by hand": (lambda program: by_hand, _by_hand_density),
}


def _made(name):
    make, density = GUIDES[name]
    guide = make(model)
    with torch.no_grad():
        guide(X, Y)
        for value in getattr(guide, "parameters", tuple)():
            value += 0.1 * torch.randn_like(value)
    return guide, density


@pytest.mark.parametrize("name", GUIDES)
def test_densities_over_the_unconstrained_latents(name):
    guide, density = _made(name)
    groups = bdl.to_arviz(model, guide, X, Y, num_samples=8, prior_samples=0)
    draws = {site: torch.tensor(groups["posterior"][site].values[0]) for site in "wsp"}
    u, log_det = unconstrained(draws)
    with torch.no_grad():
        expected = density(guide, u)
    stats = {key: torch.tensor(value.values[0]) for key, value in groups["sample_stats"].items()}
    torch.testing.assert_close(stats["log_q"], expected, rtol=1e-6, atol=1e-6)
    program = bdl.Program(model, X, Y)
    joint = torch.stack([program.log_joint({s: v[i] for s, v in draws.items()}) for i in range(8)])
    torch.testing.assert_close(stats["lp"], joint + log_det)


def test_leave_one_out_is_weighted_by_the_ratios():
    guide, _ = _made("AutoMultivariateNormal")
    pyro.set_rng_seed(1)
    samples, program = to_samples(guide, 50, X, Y), bdl.Program(model, X, Y)
    kept = bdl.Samples({s: samples.latents[s] for s in "wsp"}, samples.stats, samples.info)
    predictive, kind = bdl.Predictive(model, kept), observed(model, (X, Y), guide).kind
    found, kind = leave_one_out(model, kind, guide, predictive, (X, Y))
    assert kind == CORRECTED
    log_p, log_q = log_densities_of(program, guide, kept)
    density = predictive.log_likelihood(X, Y)["y"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bdl.errors.BdlWarning)  # k-hat
        expected = loo_approximate_posterior(density[None], log_p[None], log_q[None])
    assert found.elpd == pytest.approx(expected.elpd)
    table = bdl.compare(model, {"mvn": guide}, X, Y, reference=None, train=(X, Y), num_samples=50)
    assert table.numbers()["mvn"]["loo_by"] == "withheld, k high"  # of p / q


def test_guides_without_a_density_have_none():
    def with_a_number_more(x, y=None):
        scale = pyro.sample("scale", dist.Exponential(1.0), infer={"is_auxiliary": True})
        pyro.sample("w", dist.Normal(torch.zeros(2), scale).to_event(1))
        pyro.sample("s", dist.LogNormal(-0.5, 0.3))
        pyro.sample("p", dist.Dirichlet(torch.ones(3)))

    for guide in (AutoDelta(model), AutoLaplaceApproximation(model), with_a_number_more):
        groups = bdl.to_arviz(model, guide, X, Y, num_samples=8, prior_samples=0)
        assert set(groups["sample_stats"]) == {"lp"}
        with pytest.raises(ValueError, match="no density over all latents"):
            importance.ratios(model, guide, X, Y, num_samples=25)
    table = bdl.compare(model, {"more": guide}, X, Y, reference=None, train=(X, Y), num_samples=25)
    assert table.numbers()["more"]["loo_by"] == "withheld, not refitted"

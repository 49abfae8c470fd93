"""``Predictive`` in Pyro's spelling gives sites, shapes and values of ``pyro.infer.Predictive``.

Each program is run by both on the same draws: all of its latents are held, so that every site whose
value they determine must be equal, and the others have the same shape.
"""

import pyro
import pyro.distributions as dist
import pyro.infer
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import (
    AutoDelta,
    AutoGuideList,
    AutoIAFNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.infer.reparam import LocScaleReparam
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning

N, S = 5, 7
X = torch.linspace(-1.0, 1.0, N, dtype=torch.float64)


pytestmark = pytest.mark.usefixtures("double")


def plain(x, y=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(a * x, 0.1), obs=y)


def without_plate(x, y=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    return pyro.sample("y", dist.Normal(a * x, 0.1).to_event(1), obs=y)


def deterministic_outside(x, y=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    f = pyro.deterministic("f", a * x)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, 0.1), obs=y)
    return f


def deterministic_inside(x, y=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        f = pyro.deterministic("f", a * x, event_dim=0)
        pyro.sample("y", dist.Normal(f, 0.1), obs=y)


def nested_plates(x, y=None):
    a = pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("columns", 3, dim=-2):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x), dim=-1):
            pyro.deterministic("f", a.sum() + b * x, event_dim=0)
            pyro.sample("y", dist.Normal(a.sum() + b * x, 0.1), obs=y)


def sibling_plates(x, y=None):
    with pyro.plate("rows", 2):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(a.sum() * x, 0.1), obs=y)


def two_targets(x, y=None, z=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(a * x, scale), obs=y)
        pyro.sample("z", dist.Poisson((a * x).exp()), obs=z)


def chained_targets(x, y=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        y = pyro.sample("y", dist.Normal(a * x, 0.1), obs=y)
        pyro.deterministic("twice", 2 * y, event_dim=0)


def hierarchy(x, y=None):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    with pyro.plate("groups", 3):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
    group = torch.arange(len(x)) % 3
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.StudentT(4.0, theta[group], 0.3), obs=y)


def reparameterized(x, y=None):
    return poutine.reparam(hierarchy, {"theta": LocScaleReparam(0.0)})(x, y)


def classes(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Categorical(logits=x[:, None] * w), obs=y)


def vector_targets(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x[:, None] * w, 0.1).to_event(1), obs=y)


def correlated_targets(x, y=None):
    ell = pyro.sample("ell", dist.LogNormal(0.0, 0.1))
    cov = torch.exp(-((x[:, None] - x) / ell).square()) + 0.1 * torch.eye(len(x))
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), cov), obs=y)


def simplex_and_positive(x, y=None):
    p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Gamma(1.0 + p[0], rate), obs=y)


def with_factor(x, y=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    pyro.factor("penalty", -a.square())
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(a * x, 0.1), obs=y)


def masked(x, y=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)), poutine.mask(mask=x > 0):
        pyro.sample("y", dist.Normal(a * x, 0.1), obs=y)


def subsampled(x, y=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x), subsample_size=2) as rows:
        pyro.sample("y", dist.Normal(a * x[rows], 0.1), obs=None if y is None else y[rows])


def local_latents(x, y=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(a, 1.0))
        pyro.sample("y", dist.Normal(z, 0.1), obs=y)


def sequential_plate(x, y=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    for i in pyro.plate("data", 2):
        pyro.sample(f"y_{i}", dist.Normal(a * x[i], 0.1), obs=None if y is None else y[i])


def autoregression(x, y=None):
    a = pyro.sample("a", dist.Normal(0.0, 0.5))
    last = x[0]
    for t in pyro.markov(range(3)):
        last = pyro.sample(f"y_{t}", dist.Normal(a * last, 0.1))


def with_param(x, y=None):
    slope = pyro.param("slope", torch.tensor(0.3))
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(a + slope * x, 0.1), obs=y)


NETWORK = bdl.models.Regression(
    bdl.bayesianize(nn.Linear(1, 1), bdl.priors.Normal(1.0)), noise=dist.HalfNormal(1.0)
)


def network(x, y=None):
    return NETWORK(x[:, None].float(), y)


PROGRAMS = [
    plain, without_plate, deterministic_outside, deterministic_inside, nested_plates,
    sibling_plates, two_targets, chained_targets, hierarchy, reparameterized, classes,
    vector_targets, correlated_targets, simplex_and_positive, with_factor, masked, subsampled,
    local_latents, with_param, sequential_plate, autoregression, network,
]  # fmt: skip
DETERMINED = {"f", "penalty", "theta"}
each = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)


def prior_draws(program, count=S):
    """Draws of the latents, (count, *shape) in their own shapes."""
    targets = {"y", "z"} if program is two_targets else {"y"}
    rows = []
    for _ in range(count):
        nodes = poutine.trace(program).get_trace(X).nodes
        rows.append(
            {
                name: node["value"].detach()
                for name, node in nodes.items()
                if node["type"] == "sample"
                and not node["is_observed"]
                and name not in targets
                and not name.startswith(("y_", "data", "rows", "columns", "groups"))
            }
        )
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def assert_same(ours, theirs, draws):
    assert ours.keys() == theirs.keys()
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
    for name in ours:
        if draws and (name in DETERMINED or name in draws):
            torch.testing.assert_close(ours[name], theirs[name])


@each
@pytest.mark.parametrize("return_sites", [(), None], ids=["default", "all"])
@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")
def test_draws_give_the_sites_of_pyro(program, return_sites):
    draws = prior_draws(program)
    theirs = pyro.infer.Predictive(program, draws, return_sites=return_sites)(X)
    ours = bdl.Predictive(program, posterior_samples=draws, return_sites=return_sites)(X)
    assert_same(ours, theirs, draws)
    if not return_sites:
        assert_same(bdl.Predictive(program, draws, return_sites=return_sites)(X), theirs, draws)


@each
@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")
def test_draws_of_the_prior_give_the_sites_of_pyro(program):
    theirs = pyro.infer.Predictive(program, num_samples=3)(X)
    ours = bdl.Predictive(program, num_samples=3)(X)
    assert_same(ours, theirs, {})


def hand_written(x, y=None):
    loc = pyro.param("loc", torch.tensor(0.2))
    pyro.sample("a", dist.Normal(loc, 0.1))


GUIDES = {
    "AutoNormal": AutoNormal,
    "AutoMultivariateNormal": AutoMultivariateNormal,
    "AutoIAFNormal": lambda model: AutoIAFNormal(model, hidden_dim=[4]),
    "AutoDelta": AutoDelta,
    "ours": bdl.guides.AutoMeanField,
}


@pytest.mark.parametrize("kind", GUIDES)
def test_guides_give_the_sites_of_pyro(kind):
    guide = GUIDES[kind](two_targets)
    pyro.infer.Trace_ELBO().loss(two_targets, guide, X, X, X.abs().round())
    sites = {"a", "scale", "y", "z"}
    for names in ((), ["a", "y"], ["y", "_RETURN"]):
        program = without_return if "_RETURN" in names else two_targets
        theirs = pyro.infer.Predictive(program, guide=guide, num_samples=4, return_sites=names)(X)
        ours = bdl.Predictive(program, guide=guide, num_samples=4, return_sites=names)(X)
        assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
        assert ours.keys() == (set(names) or sites)


def without_return(x, y=None, z=None):
    two_targets(x, y, z)
    return 2 * x


def test_a_guide_of_some_latents_leaves_the_others_to_the_prior():
    ours = bdl.Predictive(two_targets, guide=hand_written, num_samples=400)(X)
    assert abs(ours["a"].mean() - 0.2) < 0.03 and ours["a"].std() < 0.2
    logs = ours["scale"].log()  # LogNormal(0, 1); 400 draws: 5 standard errors
    assert abs(logs.mean()) < 0.25 and abs(logs.std() - 1) < 0.2
    with pytest.raises(ValueError, match="scale"):
        bdl.Predictive(two_targets, hand_written, num_samples=3)(X)


def test_a_list_of_guides():
    guide = AutoGuideList(two_targets)
    guide.append(AutoNormal(poutine.block(two_targets, expose=["a"])))
    guide.append(AutoDelta(poutine.block(two_targets, expose=["scale"])))
    guide(X, X, X.abs())
    found = bdl.Predictive(two_targets, guide, num_samples=6)(X)
    assert found["y"].shape == found["z"].shape == (6, N)


def test_given_data_are_returned_in_pyros_spelling_and_drawn_in_ours():
    draws = prior_draws(plain)
    theirs = pyro.infer.Predictive(plain, draws)(X, X)
    ours = bdl.Predictive(plain, posterior_samples=draws)(X, X)
    assert torch.equal(ours["y"], theirs["y"]) and torch.equal(ours["y"][0], X)
    assert not torch.equal(
        bdl.Predictive(plain, bdl.Samples({"a": draws["a"][None]}))(X, X)["y"][0], X
    )


def test_return_sites_of_our_own_spelling():
    samples = bdl.Samples({"a": prior_draws(plain)["a"][None]})
    every = bdl.Predictive(deterministic_outside, samples, return_sites=None)(X)
    assert {k: v.shape for k, v in every.items()} == {"a": (S,), "f": (S, N), "y": (S, N)}
    assert torch.equal(every["a"], samples.latents["a"][0])
    some = bdl.Predictive(deterministic_outside, samples, return_sites=["f", "_RETURN"])(X)
    assert some.keys() == {"f", "_RETURN"} and torch.equal(some["f"], some["_RETURN"])
    with pytest.raises(ValueError, match="'g', which is no site"):
        bdl.Predictive(deterministic_outside, samples, return_sites=["g"])(X)


def test_latents_of_a_subsampled_plate_are_of_the_rows_of_each_draw():
    draws = {"a": torch.ones(50)}
    found = bdl.Predictive(rows_returned, posterior_samples=draws, return_sites=["f", "_RETURN"])(X)
    assert torch.equal(found["f"], X[found["_RETURN"]]) and len(found["f"].unique()) == N


def rows_returned(x, y=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x), subsample_size=2) as rows:
        pyro.deterministic("f", a * x[rows], event_dim=0)
    return rows


def test_a_number_of_draws_other_than_that_of_the_samples_is_said():
    with pytest.warns(BdlWarning, match="num_samples=3 has no effect"):
        assert len(bdl.Predictive(plain, prior_draws(plain), 3)(X)["y"]) == S


def test_one_posterior():
    with pytest.raises(ValueError, match="one of posterior"):
        bdl.Predictive(plain, prior_draws(plain), guide=hand_written)
    with pytest.raises(ValueError, match="num_samples for draws of the prior"):
        bdl.Predictive(plain)

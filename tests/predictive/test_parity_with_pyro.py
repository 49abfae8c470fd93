"""``Predictive`` gives the values of ``pyro.infer.Predictive``.

Each program is run by both on the same draws: all of its latents are held, so that every site whose
value they determine must be equal.
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
    AutoNormal,
)
from pyro.infer.reparam import LocScaleReparam

import pyro_bdl as bdl

N, S = 5, 7
X = torch.linspace(-1.0, 1.0, N, dtype=torch.float64)


pytestmark = pytest.mark.usefixtures("double")


def plain(x, y=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(a * x, 0.1), obs=y)


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


def two_targets(x, y=None, z=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(a * x, scale), obs=y)
        pyro.sample("z", dist.Poisson((a * x).exp()), obs=z)


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


def with_factor(x, y=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    pyro.factor("penalty", -a.square())
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(a * x, 0.1), obs=y)


def local_latents(x, y=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(a, 1.0))
        pyro.sample("y", dist.Normal(z, 0.1), obs=y)


PROGRAMS = [
    plain, deterministic_outside, deterministic_inside, nested_plates, two_targets, hierarchy,
    reparameterized, with_factor, local_latents,
]  # fmt: skip
DETERMINED = {"f", "penalty", "theta"}


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


each = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)


@each
@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")
def test_draws_give_the_values_of_pyro(program):
    draws = prior_draws(program)
    theirs = pyro.infer.Predictive(program, draws, return_sites=None)(X)
    ours = bdl.Predictive(program, draws)(X)
    latents = {"a", "b", "z", "w", "p"} & draws.keys()
    assert theirs.keys() - draws.keys() - {"penalty"} <= ours.keys() <= theirs.keys() - latents
    for name, value in ours.items():
        assert value.numel() == theirs[name].numel() and len(value) == S
        if name in DETERMINED:
            torch.testing.assert_close(value, theirs[name].reshape(value.shape))


@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")
def test_draws_of_the_prior():
    """Latents without draws are among the results, and what follows them comes from them."""
    found = bdl.Predictive(deterministic_outside, num_samples=400)(X)
    assert {name: value.shape for name, value in found.items()} == {
        "a": (400,), "f": (400, N), "y": (400, N)
    }  # fmt: skip
    torch.testing.assert_close(found["f"], found["a"][:, None] * X)
    assert abs(found["a"].mean()) < 0.25 and abs(found["a"].std() - 1) < 0.2
    assert ((found["y"] - found["f"]).std() - 0.1).abs() < 0.02


def hand_written(x, y=None):
    loc = pyro.param("loc", torch.tensor(0.2))
    pyro.sample("a", dist.Normal(loc, 0.1))


def test_draws_of_some_latents_leave_the_others_to_the_prior():
    draws = {"a": 0.2 + 0.1 * torch.randn(400)}
    ours = bdl.Predictive(two_targets, draws)(X)
    assert ours.keys() == {"scale", "y", "z"}
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

"""Which figures a comparison has, and what they are drawn of."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl import PredictiveDraws
from pyro_bdl.comparison.report import figures
from pyro_bdl.comparison.report.figures import CAPTIONS
from pyro_bdl.data import Dataset


def plane(x, y=None):
    """f = x w with its noise and scale unknown; y ~ Normal(f, noise)."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    noise = pyro.sample("noise", dist.LogNormal(0.0, 1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[-1]), scale).to_event(1))
    f = pyro.deterministic("f", x @ w)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, noise), obs=y)


def samples(size, chains=2, draws=40):
    return bdl.Samples(
        {
            "scale": torch.rand(chains, draws) + 1,
            "noise": torch.rand(chains, draws) + 0.5,
            "w": torch.randn(chains, draws, size),
        }
    )


@pytest.fixture(scope="module")
def compared():
    """A comparison of posteriors of so many inputs, the posteriors and the data."""

    def compared(size, *, posteriors=None, reference="nuts"):
        x, y = torch.randn(9, size), torch.randn(9)
        if posteriors is None:
            posteriors = {"a": samples(size, chains=1), "nuts": samples(size)}
        costs = dict.fromkeys(posteriors, bdl.Costs(seconds=1.0))
        result = bdl.compare(
            plane, posteriors, x, y, reference=reference, costs=costs, units=(50.0, 0.0)
        )
        names = tuple(f"x{i}" for i in range(size))
        data = Dataset(x[:4], y[:4], x, y, names, "height (m)", "regression", y_sd=50.0)
        return result, posteriors, data

    return compared


OWN = ["forest", "calibration", "ppc", "pit", "function_space", "cost"]


@pytest.mark.parametrize(("size", "first"), [(1, ["bands"]), (3, [])])
def test_figures_by_the_number_of_inputs(compared, size, first):
    result, posteriors, data = compared(size)
    assert list(result.figures()) == [*first, *OWN, "hyperparameters", "ranks"]
    shown = result.figures(data=data, posteriors=posteriors)
    assert list(shown) == [*first, *OWN, "hyperparameters", "ranks"]
    assert set(CAPTIONS) == {"bands", *shown}


def test_labels_and_training_data(compared):
    result, _, data = compared(1)
    axis = result.figures(data=data)["bands"].axes[0]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("x0", "height (m)")
    np.testing.assert_allclose(axis.lines[-1].get_ydata(), 50 * data.y_train)


def test_hyperparameters_and_ranks_are_of_the_draws(compared):
    """The compared latents are shown without their posteriors too; the noise is in the target's
    units, w has a number for each input."""
    result, posteriors, data = compared(2)
    latents = ["scale", "noise,\ntarget's units", "w[0]", "w[1]"]
    alone = result.figures(data=data)["hyperparameters"]
    assert [axis.get_title(loc="left") for axis in alone.axes] == latents
    drawn = result.figures(data=data, posteriors=posteriors)
    titles = [axis.get_title(loc="left") for axis in drawn["hyperparameters"].axes]
    assert titles == latents
    median = drawn["hyperparameters"].axes[1].lines[2].get_xdata()
    exact = 50 * np.quantile(posteriors["a"].latents["noise"].double(), 0.5)
    np.testing.assert_allclose(median, exact, rtol=1e-6)
    titles = [axis.get_title(loc="left") for axis in drawn["ranks"].axes]
    places = list(figures.points(result, data))
    assert titles == [*places, "scale", "noise, target's units", "w[0]", "w[1]"]
    assert all(title.startswith("point ") and ", target " in title for title in places)


def test_of_many_latents_the_farthest_are_shown(compared):
    far = samples(9)
    far.latents["w"][..., 4] += 3.0
    far.latents["noise"] += 2.0
    result, _, _ = compared(9, posteriors={"a": far, "nuts": samples(9)})
    titles = [axis.get_title(loc="left") for axis in result.figures()["hyperparameters"].axes]
    assert len(titles) == 6 and {"noise", "w[4]"} <= set(titles)


def test_points_run_from_the_surest_to_the_least_sure(compared):
    sd = torch.tensor([3.0, 1.0, 7.0, 5.0, 4.0, 2.0, 6.0, 8.0, 9.0])
    given = {"a": samples(1), "nuts": PredictiveDraws(torch.randn(200, 1).sign() * sd)}
    result, _, _ = compared(1, posteriors=given)
    assert list(figures.points(result).values()) == [(1,), (4,), (6,), (8,)]
    assert "point 4" in figures.points(result)


@pytest.mark.parametrize(
    "nuts, lacking",
    [
        (samples(3, chains=1), {"ranks"}),  # a single chain
        (PredictiveDraws(torch.randn(50, 9)), {"ranks"}),  # whose function alone is known
        (None, {"forest", "function_space", "cost", "ranks"}),  # no reference
    ],
)
def test_what_is_not_known_is_not_drawn(compared, nuts, lacking):
    given = {"a": samples(3)} if nuts is None else {"a": samples(3), "nuts": nuts}
    reference = None if nuts is None else "nuts"
    result, posteriors, _ = compared(3, posteriors=given, reference=reference)
    assert set(CAPTIONS) - set(result.figures(posteriors=posteriors)) == {"bands", *lacking}


def test_figures_leave_the_generator_alone(compared):
    x, y = torch.randn(9, 2), torch.randn(9)
    guide = bdl.guides.AutoMeanField(plane)
    guide.prototype(x, y)
    result, posteriors, _ = compared(2, posteriors={"vi": guide, "nuts": samples(2)})
    state = torch.get_rng_state()
    twice = [result.figures(posteriors=posteriors)["hyperparameters"] for _ in range(2)]
    assert torch.equal(state, torch.get_rng_state())
    first, second = (figure.axes[1].lines[0].get_xydata() for figure in twice)
    np.testing.assert_array_equal(first, second)


def test_the_figure_of_classes_has_the_order_of_the_ranking():
    """A point at the reference's mean probability has total variation 0, and is farther than a
    posterior of nearly the same spread: the figure goes by the ranking's distance."""

    def coin(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=w.expand(len(x))), obs=y)

    torch.manual_seed(0)
    w = torch.randn(4, 250)
    mean = w.sigmoid().mean().logit()
    draws = {"point": mean.expand(4, 250), "near": w[:, torch.randperm(250)] + 0.1, "nuts": w}
    posteriors = {name: bdl.Samples({"w": value.clone()}) for name, value in draws.items()}
    costs = {name: bdl.Costs(seconds=1.0 + i) for i, name in enumerate(draws)}
    result = bdl.compare(coin, posteriors, torch.zeros(5, 1), torch.ones(5), costs=costs)
    rows = result.numbers()
    assert rows["point"]["total_variation"] < rows["near"]["total_variation"]
    assert list(result.judgments) == ["nuts", "near", "point"]
    lines = result.figures()["cost"].axes[0].lines
    heights = {line.get_label(): line.get_ydata() for line in lines}
    assert heights["near"] == [pytest.approx(rows["near"]["wasserstein"])]

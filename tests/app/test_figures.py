"""Which figures a comparison has, and what they are drawn of."""

import functools

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl import PredictiveDraws
from pyro_bdl.app import figures
from pyro_bdl.app.figures import CAPTIONS


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
    def compared(size, *, posteriors=None, reference="nuts"):
        x, y = torch.randn(9, size), torch.randn(9)
        if posteriors is None:
            posteriors = {"a": samples(size, chains=1), "nuts": samples(size)}
        costs = dict.fromkeys(posteriors, bdl.Costs(seconds=1.0))
        found = bdl.compare(plane, posteriors, x, y, reference=reference, costs=costs)
        return found, posteriors

    return compared


@pytest.fixture(scope="module")
def names(compared):
    """The figures of a program with so many inputs, without and with its posteriors."""

    @functools.cache
    def names(size):
        found, posteriors = compared(size)
        return list(found.figures()), list(found.figures(posteriors=posteriors))

    return names


@pytest.mark.parametrize(("size", "first"), [(1, ["bands"]), (2, ["sd_map"]), (3, [])])
def test_figures_by_the_number_of_inputs(names, size, first):
    own = ["forest", "calibration", "pit", "function_space", "cost"]
    latents = ["hyperparameters", "pairs", "trace", "ranks", "layers"]
    assert names(size) == ([*first, *own, "trace", "ranks"], [*first, *own, *latents])


def test_every_caption_is_of_a_figure_and_a_sentence(names):
    assert {*names(1)[1], *names(2)[1]} == set(CAPTIONS)
    assert all(caption.endswith(".") for caption in CAPTIONS.values())


def test_labels_and_training_data(compared):
    found, _ = compared(1)
    train = torch.randn(4, 1), torch.randn(4)
    bands = found.figures(target="height (m)", features=["age"], train=train)["bands"]
    assert bands.axes[0].get_xlabel() == "age"
    assert bands.axes[0].get_ylabel() == "height (m)"
    np.testing.assert_allclose(bands.axes[0].lines[-1].get_ydata(), train[1])
    found, _ = compared(2)
    axis = found.figures(features=["east", "north"])["sd_map"].axes[0]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("east", "north")


def test_hyperparameters_and_chains_are_the_draws(compared):
    found, posteriors = compared(2)
    figures = found.figures(posteriors=posteriors)
    titles = [axis.get_title(loc="left") for axis in figures["hyperparameters"].axes]
    assert titles == ["scale", "noise"]  # w has a dimension
    median = figures["hyperparameters"].axes[1].lines[2].get_xdata()
    np.testing.assert_allclose(
        median, np.quantile(posteriors["a"].latents["noise"].double(), 0.5), rtol=1e-6
    )
    traced = {axis.get_title(loc="left"): axis for axis in figures["trace"].axes}
    noise = [line.get_ydata() for line in traced["noise"].lines]
    np.testing.assert_allclose(noise, posteriors["nuts"].latents["noise"])
    functions = [name for name in traced if name.startswith("point")]
    place = int(functions[0].split()[1])
    expected = found.inputs[0][place] @ posteriors["nuts"].latents["w"][..., None]
    np.testing.assert_allclose(
        [line.get_ydata() for line in traced[functions[0]].lines], expected[..., 0], rtol=1e-5
    )


def test_a_single_chain_has_a_trace_and_no_ranks(compared):
    given = {"a": samples(3), "nuts": samples(3, chains=1)}
    found, posteriors = compared(3, posteriors=given)
    shown = found.figures(posteriors=posteriors)
    assert "trace" in shown and "ranks" not in shown and "layers" not in shown


def test_without_a_reference(compared):
    found, posteriors = compared(1, reference=None)
    assert list(found.figures()) == ["bands", "calibration", "pit"]
    shown = found.figures(posteriors=posteriors)
    assert list(shown) == ["bands", "calibration", "pit", "hyperparameters", "pairs"]


def test_a_reference_of_which_only_the_function_is_known(compared):
    given = {"a": samples(3), "nuts": PredictiveDraws(torch.randn(50, 9))}
    found, posteriors = compared(3, posteriors=given)
    shown = found.figures(posteriors=posteriors)
    assert [axis.get_title(loc="left") for axis in shown["pit"].axes] == ["a"]
    assert "trace" not in shown and "layers" not in shown and "hyperparameters" in shown


def test_figures_leave_the_generator_alone(compared):
    x, y = torch.randn(9, 2), torch.randn(9)
    guide = bdl.guides.AutoMeanField(plane)
    guide.prototype(x, y)
    found, posteriors = compared(2, posteriors={"vi": guide, "nuts": samples(2)})
    state = torch.get_rng_state()
    twice = [found.figures(posteriors=posteriors)["pairs"] for _ in range(2)]
    assert torch.equal(state, torch.get_rng_state())
    first, second = (figure.axes[1].lines[0].get_xydata() for figure in twice)
    np.testing.assert_array_equal(first, second)


def test_the_figure_of_classes_has_the_order_of_the_ranking():
    """A point at the reference's mean probability has total variation 0, and is farther than a
    posterior of nearly the same spread: the figure and its words go by the ranking's distance."""

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
    found = bdl.compare(coin, posteriors, torch.zeros(5, 1), torch.ones(5), costs=costs)
    rows = found.numbers()
    assert rows["point"]["total_variation"] < rows["near"]["total_variation"]
    assert list(found.judgments) == ["nuts", "near", "point"]
    words = figures.alternative("cost", found)
    assert words.index("near") < words.index("point")
    heights = {line.get_label(): line.get_ydata() for line in found.figures()["cost"].axes[0].lines}
    assert heights["near"] == [pytest.approx(rows["near"]["wasserstein"])]

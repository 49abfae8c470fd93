"""Properties of every figure: it accepts any tensor, and does not change matplotlib."""

import io
import sys
import warnings

import matplotlib
import pytest
import torch

from pyro_bdl import diagnostics, plots
from pyro_bdl.calibration import Calibration
from pyro_bdl.plots import style


def _figures(make):
    """Each figure of tensors that ``make`` puts on a device, of a dtype."""
    torch.manual_seed(0)
    x, y = make(torch.rand(8)), make(torch.randn(8))
    names = ("map", "mean-field", "nuts")
    draws = {name: make(i * torch.randn(40, 8)) for i, name in enumerate(names)}
    scalars = {name: {"noise": q[:, 0], "scale": q[:, 1]} for name, q in draws.items()}
    chains = {"f": make(torch.randn(2, 40)), "noise": make(torch.randn(2, 40))}
    probabilities = {name: q[:5, :8].softmax(-1) for name, q in draws.items()}
    known = {"reference": "nuts"}
    return {
        "predictive_bands": plots.predictive_bands(x, draws, x_train=x, y_train=y, **known),
        "coverage": plots.calibration(draws, y, task="regression", **known),
        "reliability": plots.calibration(
            probabilities, (y[:5] > 0).long(), task="classification", **known
        ),
        "pit_histogram": plots.pit_histogram(draws, y, **known),
        "sd_ratio_maps": plots.sd_ratio_maps(torch.stack([x, y], 1), draws, **known),
        "probability_maps": plots.probability_maps(
            torch.cartesian_prod(torch.arange(4.0), torch.arange(2.0)).to(x),
            {"map": (y > 0).to(x)},
            x_train=torch.stack([x, y], 1),
            y_train=(y > 0),
        ),
        "forest": plots.forest(draws, **known),
        "intervals": plots.intervals(scalars, **known),
        "pairs": plots.pairs(scalars, **known),
        "function_space": plots.function_space(draws, **known),
        "trace": plots.trace(chains),
        "ranks": plots.ranks(chains),
        "convergence": plots.convergence(diagnostics.summary(chains)),
        "cost": plots.cost_against_quality({"map": 1.0, "nuts": 9.0}, {"map": 0.5}, **known),
        "rank_histograms": plots.rank_histograms(
            Calibration(torch.randint(0, 20, (60, 2), device=x.device), 19, ("a", "b"))
        ),
    }


def _rendered(figure):
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=50)
    return file.getvalue()


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float64, marks=pytest.mark.slow),
        pytest.param(torch.float32, marks=pytest.mark.slow),
        pytest.param(torch.float16, marks=pytest.mark.slow),
        torch.bfloat16,
    ],
    ids=str,
)
def test_any_dtype_that_wants_gradients(dtype):
    figures = _figures(lambda values: values.to(dtype).requires_grad_())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of a layout that had no room
        assert all(map(_rendered, figures.values()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_tensors_on_another_device(dtype, device):
    assert all(map(_rendered, _figures(lambda values: values.to(device, dtype)).values()))


def test_pyplot_and_settings_are_left_alone_and_figures_are_five_inches_wide():
    before, settings = set(sys.modules), dict(dict.items(matplotlib.rcParams))
    for figure in _figures(torch.clone).values():
        _rendered(figure)
        assert figure.get_figwidth() == 5.0
    # As they are stored: to read the backend is to choose one.
    assert dict(dict.items(matplotlib.rcParams)) == settings
    assert "matplotlib.pyplot" not in set(sys.modules) - before
    if "matplotlib.pyplot" in sys.modules:
        assert sys.modules["matplotlib.pyplot"].get_fignums() == []


def test_colors_are_the_same_in_every_figure(draws, line):
    bands = plots.predictive_bands(torch.arange(8.0), draws, reference="nuts")
    space = plots.function_space(draws, reference="nuts")
    forest = plots.forest(draws, reference="nuts")
    color = line(space.axes[0], "mean-field").get_color()
    assert bands.axes[1].lines[0].get_color() == color
    assert line(forest.axes[0], "mean-field").get_color() == color
    names = dict.fromkeys("abcdefgh")
    assert len({style["color"] for style in plots.styles(names).values()}) == 8


def test_twenty_posteriors_are_told_apart_and_dark_pages_know_every_color():
    found = plots.styles([str(i) for i in range(21)], "20")
    pairs = [(look["color"], look["marker"]) for look in found.values()]
    assert len(set(pairs)) == 21
    first = pairs[1:13]
    assert len({color for color, _ in first}) == len({marker for _, marker in first}) == 12
    assert {color for color, _ in pairs} <= set(style.DARK)


DRAWS = {"a": torch.zeros(4, 8), "b": torch.zeros(4, 8)}
X = torch.zeros(8, 2)


@pytest.mark.parametrize(
    "draw, words",
    [
        (lambda: plots.predictive_bands(torch.zeros(5), DRAWS), "there are 5 inputs"),
        (lambda: plots.predictive_bands(torch.zeros(8), DRAWS, level=90), "level must lie between"),
        (lambda: plots.calibration(DRAWS, torch.zeros(8), task="ranking"), "task='ranking'"),
        (lambda: plots.calibration({}, torch.zeros(8), task="regression"), "no posterior"),
        (lambda: plots.pit_histogram(DRAWS, torch.zeros(7)), r"y has shape \(7,\)"),
        (lambda: plots.pit_histogram(DRAWS, torch.zeros(8), bins=1), "bins must be at least 2"),
        (lambda: plots.function_space(DRAWS, reference="vi"), "'vi' is not among"),
        (lambda: plots.function_space({"a": X}, reference="a"), "no posterior besides"),
        (lambda: plots.forest({"a": X, "b": X[:, :1]}), "same test points"),
        (lambda: plots.intervals({"a": {}}), "no quantity"),
        (lambda: plots.cost_against_quality({"a": 1.0}, {}), "no value for 'a'"),
        (lambda: plots.temperature_curves({"NLPD": {}}), "no curve, or a curve without points"),
        (lambda: plots.ranks({"a": torch.randn(1, 20)}), "a single one"),
        (lambda: plots.ranks({"a": torch.randn(2, 20)}, bins=21), "between 1 and the 20 draws"),
        (lambda: plots.trace({"a": X, "b": X[:3]}), "the same for all"),
        (lambda: plots.trace({}), "no quantity"),
        (lambda: plots.pairs({"a": dict.fromkeys("abcdefg", X[0])}), "1 to 6 quantities, got 7"),
        (lambda: plots.pairs({"a": {"x": X[0]}, "b": {"y": X[0]}}), "has the quantities y"),
        (lambda: plots.sd_ratio_maps(X[:, :1], DRAWS, reference="a"), "x must have shape"),
        (lambda: plots.sd_ratio_maps(X, {"a": X}, reference="a"), "there are 8 inputs|besides"),
        (lambda: plots.probability_maps(X, {"a": 2 * torch.ones(8)}), "between 0 and 1"),
        (lambda: plots.probability_maps(X, {"a": torch.ones(8)}), "rectangular grid"),
    ],
)
def test_what_cannot_be_drawn_is_said(draw, words):
    with pytest.raises(ValueError, match=words):
        draw()


def test_the_highest_bar_of_any_panel_is_inside():
    mixed = torch.randn(2, 200)
    figure = plots.ranks({"a": mixed, "b": mixed + 10 * torch.arange(2.0)[:, None]})
    assert all(axis.get_ylim()[0] == 0 and axis.get_ylim()[1] > 20 for axis in figure.axes)

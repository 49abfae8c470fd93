"""Properties of every figure: it accepts any tensor, and does not change matplotlib."""

import io
import sys
import warnings
from types import SimpleNamespace

import matplotlib
import pytest
import torch
from helpers import second_device
from matplotlib import pyplot

from pyro_bdl import plots
from pyro_bdl.calibration import Calibration
from pyro_bdl.plots import style


def _figures(make):
    """A figure of each kind, of tensors that ``make`` puts on a device, of a dtype."""
    torch.manual_seed(0)
    x, y = make(torch.rand(8)), make(torch.randn(8))
    names = ("map", "mean-field", "nuts")
    draws = {name: make(i * torch.randn(40, 8)) for i, name in enumerate(names)}
    scalars = {name: {"noise": q[:, 0], "scale": q[:, 1]} for name, q in draws.items()}
    probabilities = {name: q[:5, :8].softmax(-1) for name, q in draws.items()}
    known = {"reference": "nuts"}
    grid = torch.cartesian_prod(torch.arange(4.0), torch.arange(2.0)).to(x)
    inside = {"map": (y > 0).to(x)}
    return [
        plots.predictive_bands(x, draws, x_train=x, y_train=y, **known),
        plots.prior_predictive(x, draws, y=y),
        plots.calibration(draws, y, task="regression", **known),
        plots.calibration(probabilities, (y[:5] > 0).long(), task="classification", **known),
        plots.pit_ecdf({name: q[0].sigmoid() for name, q in draws.items()}, **known),
        plots.residuals(x, {name: q[0].sigmoid() for name, q in draws.items()}, **known),
        plots.ppc(draws, y, **known),
        plots.ppc(draws, y, statistics={"mean": lambda v: v.mean(-1)}, **known),
        plots.probability_maps(grid, inside, x_train=grid, y_train=(y > 0)),
        plots.intervals(scalars, **known),
        plots.function_space(draws, **known),
        plots.ranks({"f": make(torch.randn(2, 40)), "noise": make(torch.randn(2, 40))}),
        plots.cost_against_quality({"map": 1.0, "nuts": 9.0}, {"map": 0.5}, **known),
        plots.rank_histograms(
            Calibration(torch.randint(0, 20, (60, 2), device=x.device), 19, ("a", "b"))
        ),
    ]


def _rendered(figure):
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=50)
    return file.getvalue()


def test_any_dtype_that_wants_gradients_and_matplotlib_is_left_alone():
    """Figures are five inches wide."""
    settings = dict(dict.items(matplotlib.rcParams))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of a layout that had no room
        for figure in _figures(lambda values: values.bfloat16().requires_grad_()):
            assert _rendered(figure) and figure.get_figwidth() == 5.0
    # As they are stored: to read the backend is to choose one.
    assert dict(dict.items(matplotlib.rcParams)) == settings
    assert pyplot.get_fignums() == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_tensors_on_another_device(dtype, device):
    figures = _figures(lambda values: second_device.moved(values.to(dtype), device))
    assert all(map(_rendered, figures))


def test_colors_are_the_same_in_every_figure(draws, line):
    bands = plots.predictive_bands(torch.arange(8.0), draws, reference="nuts")
    space = plots.function_space(draws, reference="nuts")
    color = line(space.axes[0], "mean-field").get_color()
    assert bands.axes[1].lines[0].get_color() == color


def test_twenty_posteriors_are_told_apart_and_dark_pages_know_every_color():
    looks = plots.styles([str(i) for i in range(21)], "20")
    pairs = [(look["color"], look["marker"]) for look in looks.values()]
    assert len(set(pairs)) == 21
    first = pairs[1:13]
    assert len({color for color, _ in first}) == len({marker for _, marker in first}) == 12
    assert {color for color, _ in pairs} <= set(style.DARK)


def test_figures_of_a_user_look_like_those_of_the_package():
    with matplotlib.rc_context():
        plots.use_style()
        figure, axis = pyplot.subplots()
        (line,) = axis.plot([0, 1])
        assert tuple(figure.get_size_inches()) == (5.0, 3.0)
        assert line.get_color() == style.COLORS[0]
        assert not axis.spines["top"].get_visible()
        pyplot.close(figure)


def test_figures_of_a_notebook_have_twice_the_pixels(monkeypatch):
    formats = []
    inline = SimpleNamespace(set_matplotlib_formats=formats.append)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    monkeypatch.setitem(sys.modules, "matplotlib_inline", SimpleNamespace(backend_inline=inline))
    monkeypatch.setitem(sys.modules, "matplotlib_inline.backend_inline", inline)
    with matplotlib.rc_context():
        plots.use_style()
    assert formats == ["retina"]


DRAWS = {"a": torch.zeros(4, 8), "b": torch.zeros(4, 8)}
X = torch.zeros(8, 2)


@pytest.mark.parametrize(
    "draw, words",
    [
        (lambda: plots.predictive_bands(torch.zeros(5), DRAWS), "at the 5 inputs"),
        (lambda: plots.predictive_bands(torch.zeros(8), DRAWS, level=90), "level must lie between"),
        (lambda: plots.calibration(DRAWS, torch.zeros(8), task="ranking"), "task must be one of"),
        (lambda: plots.calibration({}, torch.zeros(8), task="regression"), "are: none"),
        (lambda: plots.function_space(DRAWS, reference="vi"), "'vi' must be among"),
        (lambda: plots.function_space({"a": X, "b": X[:, :1]}, reference="a"), r"be \(S, 2, ...\)"),
        (lambda: plots.intervals({"a": {}}), "no quantity"),
        (lambda: plots.cost_against_quality({"a": 1.0}, {}), "no value for 'a'"),
        (lambda: plots.temperature_curves({"NLPD": {}}), "no curve, or a curve without points"),
        (lambda: plots.ranks({"a": torch.randn(1, 20)}), "at least 2 chains"),
        (lambda: plots.ranks({"a": X, "b": X[:3]}), "the same for all"),
        (lambda: plots.ranks({}), "at least 2 chains"),
        (lambda: plots.probability_maps(X[:, :1], DRAWS), "x must have shape"),
        (lambda: plots.probability_maps(X, {"a": 2 * torch.ones(8)}), "between 0 and 1"),
        (lambda: plots.probability_maps(X, {"a": torch.ones(8)}), "rectangular grid"),
    ],
)
def test_refusals(draw, words):
    with pytest.raises(ValueError, match=words):
        draw()

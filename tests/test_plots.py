"""Figures show the numbers they should, without touching pyplot."""

import io
import sys

import numpy as np
import pytest
import torch

from pyro_bdl import metrics, plots


@pytest.fixture
def draws():
    torch.manual_seed(0)
    names = ("map", "mean-field", "nuts")
    return {name: scale * torch.randn(50, 8) for name, scale in zip(names, (0, 1, 2), strict=True)}


def line(axis, label):
    return next(each for each in axis.lines if each.get_label() == label)


def rendered(figure):
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=50)
    return file.getvalue()


def test_bands_show_mean_and_interval_in_order_of_x(draws):
    x = torch.tensor([3.0, 1, 2, 0, 7, 6, 5, 4])[:, None]
    figure = plots.predictive_bands(
        x, draws, reference="nuts", x_train=x, y_train=x[:, 0], level=0.8, ylabel="height (m)"
    )
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["map", "mean-field"]
    mean, reference = figure.axes[1].lines[0], figure.axes[1].lines[1]
    order = x[:, 0].argsort()
    assert mean.get_xdata().tolist() == list(range(8))
    np.testing.assert_allclose(mean.get_ydata(), draws["mean-field"].mean(0)[order], rtol=1e-5)
    np.testing.assert_allclose(reference.get_ydata(), draws["nuts"].mean(0)[order], rtol=1e-5)
    low, high = np.quantile(draws["nuts"][:, order].numpy(), [0.1, 0.9], axis=0)
    np.testing.assert_allclose(figure.axes[1].lines[2].get_ydata(), low, rtol=1e-5)
    np.testing.assert_allclose(figure.axes[1].lines[3].get_ydata(), high, rtol=1e-5)
    assert figure.axes[0].get_ylabel() == "height (m)"
    assert rendered(figure)


def test_bands_of_a_reference_alone(draws):
    figure = plots.predictive_bands(torch.arange(8.0), {"nuts": draws["nuts"]}, reference="nuts")
    assert len(figure.axes) == 1
    assert rendered(figure)


def test_calibration_of_regression_is_the_coverage(draws):
    y = torch.randn(8)
    spread = {name: values + torch.randn(50, 8) for name, values in draws.items()}
    figure = plots.calibration(spread, y, task="regression", reference="nuts")
    curve = line(figure.axes[0], "mean-field")
    expected = metrics.interval_coverage(spread["mean-field"], y, level=0.5)
    assert curve.get_ydata()[curve.get_xdata().tolist().index(0.5)] == expected
    assert rendered(figure)


def test_calibration_of_classes_leaves_out_empty_bins():
    p = torch.tensor([[0.95, 0.05], [0.85, 0.15], [0.85, 0.15]])
    figure = plots.calibration({"map": p}, torch.tensor([0, 0, 1]), task="classification")
    curve = line(figure.axes[0], "map")
    np.testing.assert_allclose(curve.get_xdata(), [0.85, 0.95], rtol=1e-6)
    np.testing.assert_allclose(curve.get_ydata(), [0.5, 1.0], rtol=1e-6)


def test_function_space_shows_means_and_sds(draws):
    figure = plots.function_space(draws, reference="nuts", units="mm")
    for axis, moment in zip(figure.axes, (torch.mean, torch.std), strict=True):
        points = line(axis, "mean-field")
        np.testing.assert_allclose(points.get_xdata(), moment(draws["nuts"], dim=0), rtol=1e-5)
        expected = moment(draws["mean-field"], dim=0)
        np.testing.assert_allclose(points.get_ydata(), expected, rtol=1e-5)
        assert axis.get_xlabel() == "nuts (mm)"
        assert axis.get_xlim() == axis.get_ylim()
    assert rendered(figure)


def test_function_space_thins_many_points():
    many = {"a": torch.randn(5, 300, 4), "b": torch.randn(5, 300, 4)}
    figure = plots.function_space(many, reference="b")
    assert len(line(figure.axes[0], "a").get_xdata()) == 400


def test_cost_puts_the_reference_at_the_floor():
    seconds = {"map": 2.0, "mean-field": 9.0, "nuts": 60.0, "free": 0.0}
    distance = {"map": 0.9, "mean-field": 0.2, "free": 0.1}
    figure = plots.cost_against_quality(seconds, distance, reference="nuts", floor=0.03)
    axis = figure.axes[0]
    assert line(axis, "mean-field").get_xydata().tolist() == [[9.0, 0.2]]
    assert line(axis, "nuts").get_xydata().tolist() == [[60.0, 0.03]]
    assert "free" not in [each.get_label() for each in axis.lines]
    assert rendered(figure)


def test_colours_are_the_same_in_every_figure(draws):
    bands = plots.predictive_bands(torch.arange(8.0), draws, reference="nuts")
    space = plots.function_space(draws, reference="nuts")
    colour = line(space.axes[0], "mean-field").get_color()
    assert bands.axes[1].lines[0].get_color() == colour
    names = dict.fromkeys("abcdefgh")
    assert len({style["color"] for style in plots.styles(names).values()}) == 8


def test_pyplot_is_left_alone(draws):
    before = set(sys.modules)
    rendered(plots.function_space(draws, reference="nuts"))
    assert "matplotlib.pyplot" not in set(sys.modules) - before
    if "matplotlib.pyplot" in sys.modules:
        assert sys.modules["matplotlib.pyplot"].get_fignums() == []


def test_bad_input(draws):
    with pytest.raises(ValueError, match="'vi' is not among"):
        plots.function_space(draws, reference="vi")
    with pytest.raises(ValueError, match="no posterior beside"):
        plots.function_space({"nuts": draws["nuts"]}, reference="nuts")
    with pytest.raises(ValueError, match="same test points"):
        plots.function_space({"a": torch.randn(5, 3), "b": torch.randn(5, 4)}, reference="b")
    with pytest.raises(ValueError, match=r"\(S, 5\)"):
        plots.predictive_bands(torch.zeros(5), draws)
    with pytest.raises(ValueError, match="task='ranking'"):
        plots.calibration(draws, torch.zeros(8), task="ranking")
    with pytest.raises(ValueError, match="no value for 'a'"):
        plots.cost_against_quality({"a": 1.0}, {})
    with pytest.raises(ValueError, match="no posterior"):
        plots.calibration({}, torch.zeros(8), task="regression")

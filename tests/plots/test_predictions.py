"""Bands, coverage, reliability, maps, moments against the reference."""

import numpy as np
import torch

from pyro_bdl import metrics, plots


def test_bands_show_mean_and_interval_in_order_of_x(draws):
    x = torch.tensor([3.0, 1, 2, 0, 7, 6, 5, 4])[:, None]
    figure = plots.predictive_bands(
        x, draws, reference="nuts", x_train=x, y_train=x[:, 0], level=0.8, ylabel="height (m)"
    )
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["map", "mean-field"]
    _, mean, reference, lower, upper = figure.axes[1].lines[:5]
    order = x[:, 0].argsort()
    assert mean.get_xdata().tolist() == list(range(8))
    np.testing.assert_allclose(mean.get_ydata(), draws["mean-field"].mean(0)[order], rtol=1e-5)
    np.testing.assert_allclose(reference.get_ydata(), draws["nuts"].mean(0)[order], rtol=1e-5)
    low, high = np.quantile(draws["nuts"][:, order].numpy(), [0.1, 0.9], axis=0)
    np.testing.assert_allclose(lower.get_ydata(), low, rtol=1e-5)
    np.testing.assert_allclose(upper.get_ydata(), high, rtol=1e-5)
    assert figure.axes[0].get_ylabel() == "height (m)"


def test_many_posteriors_take_two_columns():
    draws = {name: torch.randn(20, 6) for name in "abcde"}
    figure = plots.predictive_bands(torch.arange(6.0), draws, reference="e")
    assert [axis.get_title(loc="left") for axis in figure.axes] == list("abcd")
    assert len({axis.get_position().x0 for axis in figure.axes}) == 2


def test_calibration_of_regression_is_the_coverage(draws, line):
    y = torch.randn(8)
    spread = {name: values + torch.randn(50, 8) for name, values in draws.items()}
    figure = plots.calibration(spread, y, task="regression", reference="nuts")
    curve = line(figure.axes[0], "mean-field")
    expected = metrics.interval_coverage(spread["mean-field"], y, level=0.5)
    assert curve.get_ydata()[curve.get_xdata().tolist().index(0.5)] == expected
    (band,) = figure.axes[0].collections  # of 8 targets 4 are expected, 1 to 7 by chance
    at_half = band.get_paths()[0].vertices
    assert sorted(set(at_half[np.isclose(at_half[:, 0], 0.5), 1])) == [1 / 8, 7 / 8]


def test_calibration_of_classes_leaves_out_empty_bins(line):
    p = torch.tensor([[0.95, 0.05], [0.85, 0.15], [0.85, 0.15]])
    figure = plots.calibration({"map": p}, torch.tensor([0, 0, 1]), task="classification")
    curve = line(figure.axes[0], "map")
    np.testing.assert_allclose(curve.get_xdata(), [0.85, 0.95], rtol=1e-6)
    np.testing.assert_allclose(curve.get_ydata(), [0.5, 1.0], rtol=1e-6)


def test_function_space_shows_means_and_sds(draws, line):
    figure = plots.function_space(draws, reference="nuts")
    for axis, moment in zip(figure.axes, (torch.mean, torch.std), strict=True):
        points = line(axis, "mean-field")
        np.testing.assert_allclose(points.get_xdata(), moment(draws["nuts"], dim=0), rtol=1e-5)
        expected = moment(draws["mean-field"], dim=0)
        np.testing.assert_allclose(points.get_ydata(), expected, rtol=1e-5)
        assert axis.get_xlabel() == "nuts"
        assert axis.get_xlim() == axis.get_ylim()


def test_probabilities_are_at_their_place():
    """The reference comes last; each class has its marker."""
    x = torch.cartesian_prod(torch.arange(4.0), torch.arange(3.0))
    order = torch.randperm(12)
    shown = {"nuts": torch.full((12,), 0.5), "map": torch.arange(12.0) / 11}
    figure = plots.probability_maps(
        x[order],
        {name: values[order] for name, values in shown.items()},
        x_train=x[:5],
        y_train=torch.tensor([0, 1, 1, 0, 1]),
        reference="nuts",
        labels=("east", "north"),
    )
    first, second = figure.axes[:2]
    assert [axis.get_title(loc="left") for axis in (first, second)] == ["map", "nuts"]
    assert (first.get_xlabel(), first.get_ylabel()) == ("east", "north")
    expected = (np.arange(12) / 11).reshape(4, 3).T
    np.testing.assert_allclose(first.collections[0].get_array(), expected)
    assert [len(line.get_xdata()) for line in first.lines[-2:]] == [2, 3]

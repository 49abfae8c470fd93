"""Bands, coverage, reliability, probability integral transforms, moments against the reference."""

import numpy as np
import pytest
import torch
from scipy import stats

from pyro_bdl import metrics, plots
from pyro_bdl.plots.predictions import pit_counts


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


def test_calibration_of_classes_leaves_out_empty_bins(line):
    p = torch.tensor([[0.95, 0.05], [0.85, 0.15], [0.85, 0.15]])
    figure = plots.calibration({"map": p}, torch.tensor([0, 0, 1]), task="classification")
    curve = line(figure.axes[0], "map")
    np.testing.assert_allclose(curve.get_xdata(), [0.85, 0.95], rtol=1e-6)
    np.testing.assert_allclose(curve.get_ydata(), [0.5, 1.0], rtol=1e-6)


def test_pit_of_exact_predictions():
    """A target above k of S draws lies in [k, k + 1] / (S + 1)."""
    draws = torch.arange(9.0)[:, None].expand(9, 4)
    y = torch.tensor([-1.0, 0.5, 7.5, 99.0])  # ranks 0, 1, 8, 9 of 10
    np.testing.assert_allclose(pit_counts(draws, y, 10), [1, 1, 0, 0, 0, 0, 0, 0, 1, 1])
    np.testing.assert_allclose(pit_counts(draws, y, 5), [2, 0, 0, 0, 2])
    # Bins that cut a rank's stretch in two share it.
    np.testing.assert_allclose(pit_counts(draws[:, :1], y[:1], 20)[:3], [0.5, 0.5, 0])


def test_pit_spreads_ties():
    """All draws equal the target: it may lie anywhere."""
    counts = pit_counts(torch.zeros(5, 3), torch.zeros(3), 4)
    np.testing.assert_allclose(counts, [0.75, 0.75, 0.75, 0.75])


def test_pit_is_the_expectation_of_the_metric():
    """metrics.pit puts each target at random within its stretch."""
    draws, y = torch.randn(7, 3).round(), torch.randn(3).round()
    many = torch.stack([metrics.pit(draws, y) for _ in range(20_000)])
    found = np.histogram(many.numpy(), bins=4, range=(0, 1))[0] / 20_000
    # Each count is a mean of 20 000 sums of 3 indicators: an sd of at most 0.0062.
    np.testing.assert_allclose(pit_counts(draws, y, 4), found, atol=0.025)


def test_pit_bars_and_band(draws):
    y = torch.randn(8)
    figure = plots.pit_histogram(draws, y, reference="nuts", bins=4, level=0.95)
    low, high = stats.binom(8, 0.25).ppf([0.025, 0.975])
    assert [axis.get_title(loc="left") for axis in figure.axes] == list(draws)
    for axis, values in zip(figure.axes, draws.values(), strict=True):
        band, *bars = axis.patches
        assert (band.get_y(), band.get_y() + band.get_height()) == (low, high)
        heights = [bar.get_height() for bar in bars]
        np.testing.assert_allclose(heights, pit_counts(values, y, 4))
        assert sum(heights) == pytest.approx(8)
        assert axis.get_ylim()[0] == 0 and axis.get_ylim()[1] > max(high, *heights)
        assert axis.lines[-1].get_ydata()[0] == 2


def test_function_space_shows_means_and_sds(draws, line):
    figure = plots.function_space(draws, reference="nuts", units="mm")
    for axis, moment in zip(figure.axes, (torch.mean, torch.std), strict=True):
        points = line(axis, "mean-field")
        np.testing.assert_allclose(points.get_xdata(), moment(draws["nuts"], dim=0), rtol=1e-5)
        expected = moment(draws["mean-field"], dim=0)
        np.testing.assert_allclose(points.get_ydata(), expected, rtol=1e-5)
        assert axis.get_xlabel() == "nuts (mm)"
        assert axis.get_xlim() == axis.get_ylim()

"""Coverage, reliability and the probability integral transform."""

import numpy as np
import pytest
import torch
from scipy import stats

from pyro_bdl import metrics, plots


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
    np.testing.assert_allclose(plots.pit_counts(draws, y, 10), [1, 1, 0, 0, 0, 0, 0, 0, 1, 1])
    np.testing.assert_allclose(plots.pit_counts(draws, y, 5), [2, 0, 0, 0, 2])
    # Bins that cut a rank's stretch in two share it.
    np.testing.assert_allclose(plots.pit_counts(draws[:, :1], y[:1], 20)[:3], [0.5, 0.5, 0])


def test_pit_spreads_ties():
    """All draws equal the target: it may lie anywhere."""
    counts = plots.pit_counts(torch.zeros(5, 3), torch.zeros(3), 4)
    np.testing.assert_allclose(counts, [0.75, 0.75, 0.75, 0.75])


def test_pit_is_the_expectation_of_the_metric():
    """metrics.pit puts each target at random within its stretch."""
    draws, y = torch.randn(7, 3).round(), torch.randn(3).round()
    many = torch.stack([metrics.pit(draws, y) for _ in range(20_000)])
    found = np.histogram(many.numpy(), bins=4, range=(0, 1))[0] / 20_000
    # Each count is a mean of 20 000 sums of 3 indicators: an sd of at most 0.0062.
    np.testing.assert_allclose(plots.pit_counts(draws, y, 4), found, atol=0.025)


def test_pit_bars_and_band(draws):
    y = torch.randn(8)
    figure = plots.pit_histogram(draws, y, reference="nuts", bins=4, level=0.95)
    low, high = stats.binom(8, 0.25).ppf([0.025, 0.975])
    assert [axis.get_title(loc="left") for axis in figure.axes] == list(draws)
    for axis, values in zip(figure.axes, draws.values(), strict=True):
        band, *bars = axis.patches
        assert (band.get_y(), band.get_y() + band.get_height()) == (low, high)
        heights = [bar.get_height() for bar in bars]
        np.testing.assert_allclose(heights, plots.pit_counts(values, y, 4))
        assert sum(heights) == pytest.approx(8)
        assert axis.get_ylim()[0] == 0 and axis.get_ylim()[1] > max(high, *heights)
        assert axis.lines[-2].get_ydata()[0] == 2


def test_bad_input_of_calibration(draws):
    with pytest.raises(ValueError, match="task='ranking'"):
        plots.calibration(draws, torch.zeros(8), task="ranking")
    with pytest.raises(ValueError, match="no posterior"):
        plots.calibration({}, torch.zeros(8), task="regression")
    with pytest.raises(ValueError, match=r"y has shape \(7,\)"):
        plots.pit_histogram(draws, torch.zeros(7))
    with pytest.raises(ValueError, match="bins must be at least 2"):
        plots.pit_histogram(draws, torch.zeros(8), bins=1)
    with pytest.raises(ValueError, match="level must lie between 0 and 1"):
        plots.pit_histogram(draws, torch.zeros(8), level=1.0)

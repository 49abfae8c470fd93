"""Rank histograms of simulation-based calibration."""

import matplotlib
import pytest
import torch
from scipy import stats

from pyro_bdl import plots
from pyro_bdl.calibration import Calibration


@pytest.fixture
def calibration():
    """100 simulations with even ranks, and 100 of which 40 share the lowest ranks."""
    even = torch.arange(100)
    return Calibration(torch.stack([even, torch.where(even < 40, 0, even)], 1), 99, ("a", "b"))


def test_bars_are_counts_and_the_band_binomial_quantiles(calibration):
    figure = plots.rank_histograms(calibration, bins=10, level=0.95)
    low, high = stats.binom(100, 0.1).ppf([0.025, 0.975])
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["a", "b"]
    for axis, counts in zip(figure.axes, calibration.counts(10).tolist(), strict=True):
        band, *bars = axis.patches
        assert [bar.get_height() for bar in bars] == counts
        assert (band.get_y(), band.get_y() + band.get_height()) == (low, high)
        assert axis.lines[-1].get_ydata()[0] == 10
    assert calibration.counts(10)[1].tolist() == [40, 0, 0, 0, 10, 10, 10, 10, 10, 10]


def test_bars_outside_the_band_have_another_color(calibration):
    even, uneven = plots.rank_histograms(calibration, bins=10).axes
    assert len({bar.get_facecolor() for bar in even.patches[1:]}) == 1
    colors = [matplotlib.colors.to_hex(bar.get_facecolor()) for bar in uneven.patches[1:]]
    assert len(set(colors[:4])) == 1 and set(colors[:4]).isdisjoint(colors[4:])


def test_bad_input_of_rank_histograms(calibration):
    with pytest.raises(
        ValueError, match="bins must lie between 1 and the 100 possible ranks, got 107"
    ):
        plots.rank_histograms(calibration, bins=107)
    with pytest.raises(ValueError, match="level must lie"):
        plots.rank_histograms(calibration, level=99)

"""Ranks of chains, ranks of simulations and probability integral transforms."""

import matplotlib
import numpy as np
import pytest
import torch
from scipy import stats

from pyro_bdl import plots
from pyro_bdl.calibration import Calibration
from pyro_bdl.plots.histograms import rank_counts


def band_of(axis):
    """The lower and upper ends of the shaded band."""
    steps = axis.patches[0].get_data()
    return steps.baseline, steps.values


def test_ranks_are_counted_by_chain():
    """Chain 0 holds the ranks 1-5 and 11-15 of 20, chain 1 the others; ties share their rank."""
    draws = torch.tensor([[*range(5), *range(10, 15)], [*range(5, 10), *range(15, 20)]])
    assert rank_counts(draws, 4).tolist() == [[5, 0, 5, 0], [0, 5, 0, 5]]
    assert rank_counts(torch.zeros(2, 6), 3).tolist() == [[0, 6, 0], [0, 6, 0]]


@pytest.mark.parametrize("length", [50, 33])
def test_rank_plots_show_counts_and_hypergeometric_band(length):
    """33 draws of 4 chains have 3 bins of 44 ranks; 50 draws 5 of 40."""
    values, bins = torch.randn(4, length), length // 10
    axis = plots.ranks({"a": values, "b": values + 10 * torch.arange(4)[:, None]}).axes[0]
    chains = [patch.get_data().values for patch in axis.patches[1:5]]
    np.testing.assert_array_equal(chains, rank_counts(values, bins))
    exact = stats.hypergeom(4 * length, 4 * length // bins, length)
    low, high = band_of(axis)
    np.testing.assert_array_equal(low, np.full(bins, exact.ppf(0.005)))
    np.testing.assert_array_equal(high, np.full(bins, exact.ppf(0.995)))
    np.testing.assert_allclose(axis.patches[-1].get_data().values, length / bins)
    assert axis.get_ylim()[0] == 0 and axis.get_ylim()[1] > length / 2  # also of the other panel


@pytest.fixture
def calibration():
    """100 simulations with even ranks, and 100 of which 40 share the lowest ranks."""
    even = torch.arange(100)
    return Calibration(torch.stack([even, torch.where(even < 40, 0, even)], 1), 99, ("a", "b"))


def test_ranks_of_simulations_and_the_binomial_band(calibration):
    figure = plots.rank_histograms(calibration)
    bins = calibration.bins
    exact = stats.binom(100, 1 / bins).ppf([0.005, 0.995])
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["a", "b"]
    for axis, counts in zip(figure.axes, calibration.counts(bins).tolist(), strict=True):
        assert [bar.get_height() for bar in axis.containers[0]] == counts
        assert [ends[0] for ends in band_of(axis)] == exact.tolist()
    colors = [matplotlib.colors.to_hex(bar.get_facecolor()) for bar in figure.axes[1].containers[0]]
    outside = [not exact[0] <= bar.get_height() <= exact[1] for bar in figure.axes[1].containers[0]]
    assert len(set(zip(colors, outside, strict=True))) == 2 and any(outside) and not all(outside)

"""Traces, ranks, sites, pairs and ranks of simulations."""

import matplotlib
import numpy as np
import pytest
import torch
from scipy import stats

from pyro_bdl import diagnostics, plots
from pyro_bdl.calibration import Calibration
from pyro_bdl.plots.chains import rank_counts


def test_traces_are_the_chains():
    draws = {"a": torch.randn(3, 20), "b": torch.randn(3, 20)}
    for axis, values in zip(plots.trace(draws).axes, draws.values(), strict=True):
        np.testing.assert_allclose([line.get_ydata() for line in axis.lines], values)


def test_ranks_are_counted_by_chain():
    """Chain 0 holds the ranks 1-5 and 11-15 of 20, chain 1 the others."""
    draws = torch.tensor([[*range(5), *range(10, 15)], [*range(5, 10), *range(15, 20)]])
    assert rank_counts(draws, 4).tolist() == [[5, 0, 5, 0], [0, 5, 0, 5]]


def test_ties_share_their_rank():
    assert rank_counts(torch.zeros(2, 6), 3).tolist() == [[0, 6, 0], [0, 6, 0]]


def test_rank_plots_show_counts_and_hypergeometric_band():
    values = torch.randn(4, 50)
    figure = plots.ranks({"a": values}, bins=10, level=0.9)
    band, expected, *chains = figure.axes[0].patches
    np.testing.assert_array_equal(
        [patch.get_data().values for patch in chains], rank_counts(values, 10)
    )
    exact = stats.hypergeom(200, 20, 50)
    np.testing.assert_array_equal(band.get_data().values, np.full(10, exact.ppf(0.95)))
    np.testing.assert_array_equal(band.get_data().baseline, np.full(10, exact.ppf(0.05)))
    np.testing.assert_allclose(expected.get_data().values, np.full(10, 5.0))


def test_band_of_unequal_bins():
    """20 ranks in 3 bins of 7, 6 and 7."""
    values = torch.randn(2, 10)
    assert rank_counts(values, 3).sum(0).tolist() == [7, 6, 7]
    figure = plots.ranks({"a": values}, bins=3)
    expected = figure.axes[0].patches[1].get_data().values
    np.testing.assert_allclose(expected, [3.5, 3.0, 3.5])


def test_rows_are_quantiles_of_each_site():
    draws = {"weight": torch.randn(4, 50, 6, 2), "bias": torch.randn(4, 50, 5)}
    summary = diagnostics.summary(draws, ess_limit=150)
    left, right = plots.convergence(summary).axes
    assert [text.get_text() for text in left.get_yticklabels()] == ["weight", "bias"]
    for row, found in enumerate(summary.by_site.values()):
        for axis, values in ((left, found.rhat), (right, found.ess_bulk)):
            reach, half, middle = axis.lines[3 * row : 3 * row + 3]
            low, lower, median, upper, high = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
            np.testing.assert_allclose(reach.get_xdata(), [low, high])
            np.testing.assert_allclose(half.get_xdata(), [lower, upper])
            np.testing.assert_allclose(middle.get_xdata(), [median])
    assert left.lines[-1].get_xdata() == [summary.rhat_limit] * 2
    assert right.lines[-1].get_xdata() == [150, 150]


def test_constants_are_left_out_and_the_worst_of_many_sites_shown():
    draws = {f"site {i}": torch.randn(2, 8) for i in range(50)}
    draws["site 45"] = draws["site 45"] + 9 * torch.arange(2.0)[:, None]
    draws["constant"] = torch.ones(2, 8)
    left, _ = plots.convergence(diagnostics.summary(draws)).axes
    shown = [text.get_text() for text in left.get_yticklabels()]
    assert len(shown) == 40 and "site 45" in shown and "constant" not in shown
    with pytest.raises(ValueError, match="all are constant"):
        plots.convergence(diagnostics.summary({"a": torch.ones(2, 8)}))


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


def test_each_pair_once_below_the_densities():
    draws = {"a": {name: torch.randn(40) for name in "xyz"}}
    figure = plots.pairs(draws)
    assert len(figure.axes) == 6
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert [title for title in titles if title] == ["x", "y", "z"]
    dots = figure.axes[3].lines[0]  # z below x
    np.testing.assert_allclose(dots.get_xdata(), draws["a"]["x"])
    np.testing.assert_allclose(dots.get_ydata(), draws["a"]["z"])
    assert figure.axes[3].get_xlabel() == "x" and figure.axes[3].get_ylabel() == "z"


def test_point_masses_are_lines_and_many_draws_are_thinned():
    draws = {
        "map": {"x": torch.full((1000,), 2.0), "y": torch.zeros(1000)},
        "nuts": {"x": torch.arange(1000.0), "y": torch.randn(1000)},
    }
    density, dots, _ = plots.pairs(draws, reference="nuts").axes
    assert density.lines[0].get_xdata() == [2.0, 2.0]
    assert dots.lines[1].get_xdata().tolist() == list(range(0, 1000, 2))

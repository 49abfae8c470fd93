"""Trace and rank plots."""

import numpy as np
import pytest
import torch
from scipy import stats

from pyro_bdl import plots


def test_traces_are_the_chains():
    draws = {"a": torch.randn(3, 20), "b": torch.randn(3, 20)}
    for axis, values in zip(plots.trace(draws).axes, draws.values(), strict=True):
        np.testing.assert_allclose([line.get_ydata() for line in axis.lines], values)


def test_ranks_are_counted_by_chain():
    """Chain 0 holds the ranks 1-5 and 11-15 of 20, chain 1 the others."""
    draws = torch.tensor([[*range(5), *range(10, 15)], [*range(5, 10), *range(15, 20)]])
    assert plots.rank_counts(draws, 4).tolist() == [[5, 0, 5, 0], [0, 5, 0, 5]]


def test_ties_share_their_rank():
    assert plots.rank_counts(torch.zeros(2, 6), 3).tolist() == [[0, 6, 0], [0, 6, 0]]


def test_rank_plots_show_counts_and_hypergeometric_band():
    values = torch.randn(4, 50)
    figure = plots.ranks({"a": values}, bins=10, level=0.9)
    band, expected, *chains = figure.axes[0].patches
    np.testing.assert_array_equal(
        [patch.get_data().values for patch in chains], plots.rank_counts(values, 10)
    )
    exact = stats.hypergeom(200, 20, 50)
    np.testing.assert_array_equal(band.get_data().values, np.full(10, exact.ppf(0.95)))
    np.testing.assert_array_equal(band.get_data().baseline, np.full(10, exact.ppf(0.05)))
    np.testing.assert_allclose(expected.get_data().values, np.full(10, 5.0))


def test_band_of_unequal_bins():
    """20 ranks in 3 bins of 7, 6 and 7."""
    values = torch.randn(2, 10)
    assert plots.rank_counts(values, 3).sum(0).tolist() == [7, 6, 7]
    figure = plots.ranks({"a": values}, bins=3)
    expected = figure.axes[0].patches[1].get_data().values
    np.testing.assert_allclose(expected, [3.5, 3.0, 3.5])


def test_the_band_holds_independent_chains():
    """As many of 20 000 counts lie within as the exact distribution says, within 4 sds."""
    inside = [
        (plots.rank_counts(torch.randn(2, 40), 4)[0] >= low).mean()
        for low in [stats.hypergeom(80, 20, 40).ppf(0.05)]
        for _ in range(5000)
    ]
    exact = stats.hypergeom(80, 20, 40).sf(stats.hypergeom(80, 20, 40).ppf(0.05) - 1)
    assert abs(np.mean(inside) - exact) < 4 * np.std(inside) / 5000**0.5


def test_bad_input_of_chains():
    with pytest.raises(ValueError, match="a single one"):
        plots.ranks({"a": torch.randn(1, 20)})
    with pytest.raises(ValueError, match=r"shape \(chains, draws\), the same for all"):
        plots.trace({"a": torch.randn(2, 20), "b": torch.randn(2, 21)})
    with pytest.raises(ValueError, match="bins must lie between 1 and the 20 draws"):
        plots.ranks({"a": torch.randn(2, 20)}, bins=21)
    with pytest.raises(ValueError, match="no quantity"):
        plots.trace({})

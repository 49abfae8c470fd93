"""Pair plots."""

import numpy as np
import pytest
import torch

from pyro_bdl import plots


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


def test_densities_have_area_one():
    figure = plots.pairs({"a": {"x": torch.randn(300)}})
    heights, edges, _ = figure.axes[0].patches[0].get_data()
    assert (heights * np.diff(edges)).sum() == pytest.approx(1)


def test_point_masses_are_lines_and_many_draws_are_thinned():
    draws = {
        "map": {"x": torch.full((1000,), 2.0), "y": torch.zeros(1000)},
        "nuts": {"x": torch.arange(1000.0), "y": torch.randn(1000)},
    }
    density, dots, _ = plots.pairs(draws, reference="nuts").axes
    assert density.lines[0].get_xdata() == [2.0, 2.0]
    assert dots.lines[1].get_xdata().tolist() == list(range(0, 1000, 2))


def test_bad_input_of_pairs():
    with pytest.raises(ValueError, match="1 to 6 quantities, got 7"):
        plots.pairs({"a": {name: torch.zeros(3) for name in "abcdefg"}})
    with pytest.raises(ValueError, match="has the quantities y, but the first posterior has x"):
        plots.pairs({"a": {"x": torch.zeros(3)}, "b": {"y": torch.zeros(3)}})

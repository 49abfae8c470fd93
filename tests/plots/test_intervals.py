"""Forest plots."""

import numpy as np
import torch

from pyro_bdl import plots
from pyro_bdl.plots.intervals import chosen_points, point_name


def test_intervals_are_quantiles(draws):
    figure = plots.forest(draws, reference="nuts", points=[5, 2], labels=["x", "y"], level=0.8)
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["x", "y"]
    for axis, place in zip(figure.axes, (5, 2), strict=True):
        assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == list(draws)
        for row, values in enumerate(draws.values()):
            outer, inner, middle = axis.lines[3 * row : 3 * row + 3]
            expected = np.quantile(values[:, place].double(), [0.1, 0.25, 0.5, 0.75, 0.9])
            np.testing.assert_allclose(outer.get_xdata(), expected[[0, 4]])
            np.testing.assert_allclose(inner.get_xdata(), expected[[1, 3]])
            np.testing.assert_allclose(middle.get_xdata(), expected[[2]])
            assert set(outer.get_ydata()) == {row}
        (shade,) = axis.patches  # the last of the posteriors is the reference
        np.testing.assert_allclose(
            [shade.get_x(), shade.get_width()], [expected[0], np.ptp(expected)]
        )


def test_titles_of_neighbors_have_a_line_for_each_part(draws):
    labels = ["point 5, target -0.892", "point 2, target -0.9"]
    figure = plots.forest(draws, reference="nuts", points=[5, 2], labels=labels)
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert titles == ["point 5,\ntarget -0.892", "point 2,\ntarget -0.9"]


def test_points_run_from_the_surest_to_the_least_sure():
    sd = torch.tensor([3.0, 1.0, 7.0, 5.0, 4.0, 2.0, 6.0])
    draws = torch.randn(200, 1).sign() * sd
    assert chosen_points(draws, 4) == [1, 0, 3, 2]
    assert chosen_points(draws[:, :2], 4) == [1, 0]


def test_points_have_names():
    assert point_name(5, torch.zeros(2, 8)) == "point 5"
    assert point_name(5, torch.zeros(2, 8, 1)) == "point 5"
    assert point_name(5, torch.zeros(2, 4, 3)) == "point 1 [2]"


def test_a_posterior_may_lack_a_quantity():
    draws = {"a": {"noise": torch.randn(9)}, "b": {"noise": torch.randn(9), "scale": torch.ones(9)}}
    first, second = plots.intervals(draws).axes
    assert len(first.lines) == 6 and len(second.lines) == 3
    assert set(second.lines[0].get_ydata()) == {1}

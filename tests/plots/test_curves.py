"""Intervals, cost against distance, scores against temperature."""

import numpy as np
import torch

from pyro_bdl import plots


def test_intervals_are_quantiles(draws):
    by_name = {name: {"x, 1": v[:, 5], "y": v[:, 2]} for name, v in draws.items()}
    figure = plots.intervals(by_name, reference="nuts")
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["x,\n1", "y"]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == list(draws)
    for axis, place in zip(figure.axes, (5, 2), strict=True):
        for row, values in enumerate(draws.values()):
            outer, inner, middle = axis.lines[3 * row : 3 * row + 3]
            expected = np.quantile(values[:, place].double(), [0.05, 0.25, 0.5, 0.75, 0.95])
            np.testing.assert_allclose(outer.get_xdata(), expected[[0, 4]])
            np.testing.assert_allclose(inner.get_xdata(), expected[[1, 3]])
            np.testing.assert_allclose(middle.get_xdata(), expected[[2]])
            assert set(outer.get_ydata()) == {row}
        (shade,) = axis.patches  # the last of the posteriors is the reference
        ends = [shade.get_x(), shade.get_width()]
        np.testing.assert_allclose(ends, [expected[0], np.ptp(expected)])


def test_a_posterior_may_lack_a_quantity():
    draws = {"a": {"noise": torch.randn(9)}, "b": {"noise": torch.randn(9), "scale": torch.ones(9)}}
    first, second = plots.intervals(draws).axes
    assert len(first.lines) == 6 and len(second.lines) == 3
    assert set(second.lines[0].get_ydata()) == {1}


def test_a_quantity_of_several_numbers_has_a_panel_for_each():
    draws = {"a": {"mean": torch.randn(9), "theta": torch.randn(9, 2, 2)}}
    axes = plots.intervals(draws).axes
    titles = ["mean", *(f"theta[{i},{j}]" for i in range(2) for j in range(2))]
    assert [axis.get_title(loc="left") for axis in axes] == titles
    expected = np.quantile(draws["a"]["theta"][:, 1, 0], [0.05, 0.95])
    np.testing.assert_allclose(axes[3].lines[0].get_xdata(), expected)


def test_cost_puts_the_reference_at_the_floor(line):
    seconds = {"map": 2.0, "mean-field": 9.0, "nuts": 60.0, "free": 0.0}
    distance = {"map": 0.9, "mean-field": 0.2, "free": 0.1}
    figure = plots.cost_against_quality(
        seconds, distance, reference="nuts", floor=0.03, errors={"map": 0.1}
    )
    axis = figure.axes[0]
    assert list(axis.lines[0].get_ydata()) == [0.7, 1.1]  # two errors each way
    assert line(axis, "mean-field").get_xydata().tolist() == [[9.0, 0.2]]
    assert line(axis, "nuts").get_xydata().tolist() == [[60.0, 0.03]]
    assert "free" not in [each.get_label() for each in axis.lines]
    empty = plots.cost_against_quality({"map": 2.0}, {"map": 0.0}, floor=0.0)
    assert not empty.axes[0].lines and not empty.legends


SCORES = {
    "NLPD": {"a": ([0.1, 1.0], [1.0, 2.0]), "b": ([0.2, 2.0], [3.0, 4.0])},
    "KL": {"a": ([0.1, 1.0], [10.0, 0.1])},
}


def test_each_score_has_a_panel_with_its_curves_and_marks():
    figure = plots.temperature_curves(SCORES, marks={"b": 0.5}, logarithmic=["KL"], label="T")
    first, second = figure.axes
    assert [axis.get_title(loc="left") for axis in (first, second)] == ["NLPD", "KL"]
    by_label = {line.get_label(): line for line in first.lines}
    assert list(by_label["b"].get_xdata()) == [0.2, 2.0]
    assert list(by_label["b"].get_ydata()) == [3.0, 4.0]
    dashed = [list(line.get_xdata()) for line in first.lines if line.get_linestyle() == "--"]
    assert dashed == [[0.5, 0.5]]
    assert any(list(line.get_xdata()) == [1.0, 1.0] for line in second.lines)
    assert second.get_xlabel() == "T" and second.get_xscale() == second.get_yscale() == "log"

"""Curves over the temperature: their points, and the temperatures that are marked."""

import pytest

from pyro_bdl.plots import temperature_curves

SCORES = {
    "NLPD": {"a": ([0.1, 1.0], [1.0, 2.0]), "b": ([0.2, 2.0], [3.0, 4.0])},
    "KL": {"a": ([0.1, 1.0], [10.0, 0.1])},
}


def test_each_score_has_a_panel_with_its_curves_and_marks():
    figure = temperature_curves(SCORES, marks={"b": 0.5}, logarithmic=["KL"], label="T")
    first, second = figure.axes
    assert [axis.get_title(loc="left") for axis in (first, second)] == ["NLPD", "KL"]
    by_label = {line.get_label(): line for line in first.lines}
    assert list(by_label["b"].get_xdata()) == [0.2, 2.0]
    assert list(by_label["b"].get_ydata()) == [3.0, 4.0]
    assert [list(line.get_xdata()) for line in first.lines if line.get_linestyle() == "--"] == [
        [0.5, 0.5]
    ]
    assert any(list(line.get_xdata()) == [1.0, 1.0] for line in second.lines)
    assert (first.get_yscale(), second.get_yscale()) == ("linear", "log")
    assert second.get_xlabel() == "T" and second.get_xscale() == "log"


def test_without_curves_it_is_refused():
    for scores in ({}, {"NLPD": {}}, {"NLPD": {"a": ([], [])}}):
        with pytest.raises(ValueError, match="no curve, or a curve without points"):
            temperature_curves(scores)

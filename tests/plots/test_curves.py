"""Cost against distance, scores against temperature."""

from pyro_bdl import plots
from pyro_bdl.plots import temperature_curves


def test_cost_puts_the_reference_at_the_floor(line):
    seconds = {"map": 2.0, "mean-field": 9.0, "nuts": 60.0, "free": 0.0}
    distance = {"map": 0.9, "mean-field": 0.2, "free": 0.1}
    figure = plots.cost_against_quality(seconds, distance, reference="nuts", floor=0.03)
    axis = figure.axes[0]
    assert line(axis, "mean-field").get_xydata().tolist() == [[9.0, 0.2]]
    assert line(axis, "nuts").get_xydata().tolist() == [[60.0, 0.03]]
    assert "free" not in [each.get_label() for each in axis.lines]


def test_distances_of_zero_leave_it_empty():
    figure = plots.cost_against_quality({"map": 2.0}, {"map": 0.0}, floor=0.0)
    assert not figure.axes[0].lines and not figure.legends


def test_errors_are_two_each_way():
    figure = plots.cost_against_quality({"a": 1.0}, {"a": 4.0}, errors={"a": 0.5})
    assert list(figure.axes[0].lines[0].get_ydata()) == [3.0, 5.0]


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

"""Cost against quality."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from pyro_bdl import plots


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


def test_bad_input_of_cost():
    with pytest.raises(ValueError, match="no value for 'a'"):
        plots.cost_against_quality({"a": 1.0}, {})


def test_each_name_stands_beside_its_mark_and_over_no_other():
    seconds = {name: 1 + 0.001 * i for i, name in enumerate(("map", "mean-field", "swag"))}
    figure = plots.cost_against_quality(seconds, {"map": 1.0, "mean-field": 1.0, "swag": 4.0})
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = {text.get_text(): text.get_window_extent(renderer) for text in figure.axes[0].texts}
    assert list(boxes) == list(seconds)
    assert not boxes["map"].overlaps(boxes["mean-field"])


def test_errors_are_two_each_way():
    figure = plots.cost_against_quality({"a": 1.0}, {"a": 4.0}, errors={"a": 0.5})
    assert list(figure.axes[0].lines[0].get_ydata()) == [3.0, 5.0]

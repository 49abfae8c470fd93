"""Cost against quality."""

import pytest

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

"""Moments of the function against the reference."""

import numpy as np
import pytest
import torch

from pyro_bdl import plots


def test_function_space_shows_means_and_sds(draws, line):
    figure = plots.function_space(draws, reference="nuts", units="mm")
    for axis, moment in zip(figure.axes, (torch.mean, torch.std), strict=True):
        points = line(axis, "mean-field")
        np.testing.assert_allclose(points.get_xdata(), moment(draws["nuts"], dim=0), rtol=1e-5)
        expected = moment(draws["mean-field"], dim=0)
        np.testing.assert_allclose(points.get_ydata(), expected, rtol=1e-5)
        assert axis.get_xlabel() == "nuts (mm)"
        assert axis.get_xlim() == axis.get_ylim()


def test_function_space_thins_many_points(line):
    many = {"a": torch.randn(5, 300, 4), "b": torch.randn(5, 300, 4)}
    figure = plots.function_space(many, reference="b")
    assert len(line(figure.axes[0], "a").get_xdata()) == 400


def test_bad_input_of_function_space(draws):
    with pytest.raises(ValueError, match="'vi' is not among"):
        plots.function_space(draws, reference="vi")
    with pytest.raises(ValueError, match="no posterior beside"):
        plots.function_space({"nuts": draws["nuts"]}, reference="nuts")
    with pytest.raises(ValueError, match="same test points"):
        plots.function_space({"a": torch.randn(5, 3), "b": torch.randn(5, 4)}, reference="b")

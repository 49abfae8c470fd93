"""Probabilities, and ratios of sds, over two inputs."""

import numpy as np
import pytest
import torch

from pyro_bdl import plots
from pyro_bdl.plots.maps import sd_ratio

X = torch.cartesian_prod(torch.arange(4.0), torch.arange(3.0)).double()


@pytest.fixture
def known():
    """The sd of "a" is 0, 1, 2, ... tenths of the reference's, exactly."""
    torch.manual_seed(0)
    reference = torch.randn(30, 12, dtype=torch.float64)
    return {"nuts": reference, "a": reference * torch.arange(12).double() / 10}


def test_ratio_of_several_outputs_is_of_the_summed_variances(known):
    """Outputs with variances (1, 0) and (1/4, 3/4) spread as much."""
    z = torch.randn(40, 5, dtype=torch.float64)
    one = torch.stack([z, torch.zeros_like(z)], -1)
    two = torch.stack([0.5 * z, 0.75**0.5 * z], -1)
    np.testing.assert_allclose(sd_ratio(two, one), np.ones(5))


def test_ratio_where_nothing_varies():
    """A constant such as 0.1 has no rounding for a spread."""
    constant, moving = torch.full((7, 1), 1e5 / 3), torch.randn(7, 1)
    assert sd_ratio(constant, moving) == 0
    assert np.isinf(sd_ratio(moving, constant))
    assert np.isnan(sd_ratio(constant, constant))


def test_tiles_show_the_ratio_at_their_place(known):
    order = torch.randperm(12)
    shuffled = {name: values[:, order] for name, values in known.items()}
    figure = plots.sd_ratio_maps(X[order], shuffled, reference="nuts", labels=("east", "north"))
    axis = figure.axes[0]
    (tiles,) = axis.collections
    expected = np.arange(12).reshape(4, 3).T / 10  # rows are the second input
    expected[0, 0] = np.finfo(float).tiny  # a log scale has no zero
    np.testing.assert_allclose(tiles.get_array(), expected)
    assert (tiles.norm.vmin, tiles.norm.vmax) == (0.25, 4)
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("east", "north")
    assert axis.get_title(loc="left") == "a"


def test_scattered_points_are_dots(known):
    points = X + 0.1 * torch.randn_like(X)
    figure = plots.sd_ratio_maps(points, known, reference="nuts", x_train=X[:3])
    (dots,) = figure.axes[0].collections
    np.testing.assert_allclose(dots.get_offsets(), points)
    np.testing.assert_allclose(dots.get_array()[1:], np.arange(1, 12) / 10)
    np.testing.assert_allclose(figure.axes[0].lines[0].get_xydata(), X[:3])


def test_probabilities_are_at_their_place():
    """The reference comes last; each class has its marker."""
    order = torch.randperm(12)
    shown = {"nuts": torch.full((12,), 0.5), "map": torch.arange(12.0) / 11}
    figure = plots.probability_maps(
        X[order],
        {name: values[order] for name, values in shown.items()},
        x_train=X[:5],
        y_train=torch.tensor([0, 1, 1, 0, 1]),
        reference="nuts",
    )
    first, second = figure.axes[:2]
    assert [axis.get_title(loc="left") for axis in (first, second)] == ["map", "nuts"]
    expected = (np.arange(12) / 11).reshape(4, 3).T
    np.testing.assert_allclose(first.collections[0].get_array(), expected)
    assert [len(line.get_xdata()) for line in first.lines[:2]] == [2, 3]

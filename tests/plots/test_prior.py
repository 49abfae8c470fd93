"""Functions of a prior, their bands, and how much they move."""

import numpy as np
import pytest
import torch

from pyro_bdl import plots

X = torch.tensor([2.0, 0.0, 1.0])


def test_bands_functions_and_the_sd_of_f(line):
    torch.manual_seed(0)
    slopes = torch.randn(500).abs() + 0.1
    draws = {"narrow": slopes[:, None] * X, "wide": 3 * slopes[:, None] * X}
    figure = plots.prior_predictive(X, draws, y=torch.tensor([0.0, 2.0]), functions=4)
    narrow, wide, spread = figure.axes
    order = X.argsort()
    for axis, values in ((narrow, draws["narrow"]), (wide, draws["wide"])):
        lines = [drawn for drawn in axis.lines if len(drawn.get_xdata()) == 3]
        assert len(lines) == 4
        for i, drawn in enumerate(lines):
            np.testing.assert_allclose(drawn.get_xdata(), [0, 1, 2])
            np.testing.assert_allclose(drawn.get_ydata(), values[i, order])
        for band, level in zip(axis.collections, (0.9, 0.5), strict=True):
            ends = values.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2]), 0)
            vertices = band.get_paths()[0].vertices
            at_two = vertices[vertices[:, 0] == 2, 1]
            assert at_two.min() == pytest.approx(ends[0, 0].item(), rel=1e-4)
            assert at_two.max() == pytest.approx(ends[1, 0].item(), rel=1e-4)
    for name, factor in (("narrow", 1), ("wide", 3)):
        curve = line(spread, name)
        np.testing.assert_allclose(curve.get_xdata(), factor * slopes.sort().values, rtol=1e-5)
        assert curve.get_ydata()[249] == 0.5
    assert spread.lines[-1].get_xdata()[0] == 1.0  # the sd of (0, 2)


def test_draws_at_other_inputs_are_refused():
    with pytest.raises(ValueError, match="prior"):
        plots.prior_predictive(X, {"prior": torch.zeros(5, 4)})

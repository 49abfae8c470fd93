"""Bands along one input."""

import numpy as np
import pytest
import torch

from pyro_bdl import plots


def test_bands_show_mean_and_interval_in_order_of_x(draws):
    x = torch.tensor([3.0, 1, 2, 0, 7, 6, 5, 4])[:, None]
    figure = plots.predictive_bands(
        x, draws, reference="nuts", x_train=x, y_train=x[:, 0], level=0.8, ylabel="height (m)"
    )
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["map", "mean-field"]
    mean, reference = figure.axes[1].lines[0], figure.axes[1].lines[1]
    order = x[:, 0].argsort()
    assert mean.get_xdata().tolist() == list(range(8))
    np.testing.assert_allclose(mean.get_ydata(), draws["mean-field"].mean(0)[order], rtol=1e-5)
    np.testing.assert_allclose(reference.get_ydata(), draws["nuts"].mean(0)[order], rtol=1e-5)
    low, high = np.quantile(draws["nuts"][:, order].numpy(), [0.1, 0.9], axis=0)
    np.testing.assert_allclose(figure.axes[1].lines[2].get_ydata(), low, rtol=1e-5)
    np.testing.assert_allclose(figure.axes[1].lines[3].get_ydata(), high, rtol=1e-5)
    assert figure.axes[0].get_ylabel() == "height (m)"


def test_bands_of_a_reference_alone(draws):
    figure = plots.predictive_bands(torch.arange(8.0), {"nuts": draws["nuts"]}, reference="nuts")
    assert len(figure.axes) == 1


def test_many_posteriors_take_two_columns():
    draws = {name: torch.randn(20, 6) for name in "abcde"}
    figure = plots.predictive_bands(torch.arange(6.0), draws, reference="e")
    assert [axis.get_title(loc="left") for axis in figure.axes] == list("abcd")
    assert len({axis.get_position().x0 for axis in figure.axes}) == 2


def test_bad_input_of_bands(draws):
    with pytest.raises(ValueError, match=r"\(S, 5\)"):
        plots.predictive_bands(torch.zeros(5), draws)
    with pytest.raises(ValueError, match="level must lie between 0 and 1, got 90"):
        plots.predictive_bands(torch.zeros(8), draws, level=90)

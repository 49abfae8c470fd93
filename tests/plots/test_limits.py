"""Panels that share an axis show all of every panel."""

import pytest
import torch

from pyro_bdl import plots
from pyro_bdl.calibration import Calibration


def _rank_histograms():
    """The first quantity's bins are even, all simulations lie in one bin of the second."""
    return plots.rank_histograms(
        Calibration(torch.stack([torch.arange(100), torch.zeros(100).long()], 1), 99, ("a", "b"))
    )


def _ranks():
    """Chains that mix in the first quantity, and one above the other in the second."""
    mixed = torch.randn(2, 200)
    return plots.ranks({"a": mixed, "b": mixed + 10 * torch.arange(2.0)[:, None]})


@pytest.mark.parametrize(("draw", "highest"), [(_rank_histograms, 100), (_ranks, 20)])
def test_the_highest_bar_of_any_panel_is_inside(draw, highest):
    for axis in draw().axes:
        low, high = axis.get_ylim()
        assert low == 0
        assert high > highest

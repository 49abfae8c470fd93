"""Draws of three posteriors, and what tests of figures share."""

import pytest
import torch


@pytest.fixture
def draws():
    torch.manual_seed(0)
    names = ("map", "mean-field", "nuts")
    return {name: scale * torch.randn(50, 8) for name, scale in zip(names, (0, 1, 2), strict=True)}


@pytest.fixture
def line():
    """The line of a panel with this label."""
    return lambda axis, label: next(each for each in axis.lines if each.get_label() == label)

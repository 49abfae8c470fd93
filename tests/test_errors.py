"""Warnings are shown at the user's line, however deep in the package they are given."""

import warnings

import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning

X, Y = torch.linspace(-1, 1, 12)[:, None], torch.linspace(-2, 2, 12)


class Memory(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.memory, self.out = torch.nn.GRU(1, 2, batch_first=True), torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.out(self.memory(x[..., None])[0][:, -1])


def model(net):
    return bdl.models.Regression(bdl.bayesianize(net), noise=0.1)


def drawn():
    program = model(Memory())
    return program, bdl.guides.AutoMeanField(program).prototype(X, Y)


def untrained():
    return bdl.guides.AutoLaplaceGGN(model(torch.nn.Linear(1, 1))).prototype(X, Y)


def chains():
    return bdl.Samples({"weight": torch.zeros(2, 5, 1, 1), "bias": torch.randn(2, 5, 1)})


GIVEN = {
    "one-by-one": lambda: bdl.Predictive(*drawn(), num_samples=3)(X),
    "not-at-a-maximum": lambda: untrained().laplace_approximation((X, Y)),
    "fewer-draws": lambda: bdl.Predictive(model(torch.nn.Linear(1, 1)), chains(), 50)(X),
    "fewer-draws, batch by batch": lambda: [
        *bdl.Predictive(model(torch.nn.Linear(1, 1)), chains(), 50).in_batches([(X, Y)])
    ],
    "k-hat": lambda: bdl.diagnostics.loo(1e3 * torch.randn(1, 100, 3)),
}


@pytest.mark.parametrize("topic", GIVEN)
def test_a_warning_is_at_the_line_that_called_the_package(topic):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", BdlWarning)
        GIVEN[topic]()
    found = [one for one in seen if f"#{topic.split(',')[0]})" in str(one.message)]
    assert found and all(one.filename == __file__ for one in found)

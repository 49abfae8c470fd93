"""The numbers of data and neurons, read from programs whose sizes are known."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import temperature
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.temperature.overparameterized import size_of

X, Y = torch.zeros(6, 3), torch.zeros(6, dtype=torch.long)


def classifier(net, num_data=None):
    return bdl.models.Classification(bdl.bayesianize(net), num_data=num_data)


def mlp(*widths):
    layers = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def test_overparameterized():
    """eta = tau p / N (Huix et al. 2022)."""
    assert temperature.overparameterized(2.0, num_data=100, num_neurons=400) == 0.5
    assert temperature.overparameterized(2.0, 100, 400) == 0.5
    model = classifier(mlp(3, 50, 2), num_data=600)
    for arguments in ((), (X, Y)):
        assert temperature.overparameterized(0.5, model, *arguments) == 0.5 * 600 / 50
    program = bdl.Program(model, X, Y)
    assert temperature.overparameterized(0.5, program) == 0.5 * 600 / 50
    assert temperature.overparameterized(0.5, model, X, Y, num_neurons=10) == 30.0
    plain = classifier(mlp(3, 50, 2))
    assert temperature.overparameterized(1.0, plain, X, Y) == 6 / 50
    with pytest.raises(ValueError, match="does not state its num_data: pass its arguments"):
        temperature.overparameterized(1.0, plain)


def test_neurons_are_the_outputs_that_enter_another_product():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.skip, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
            self.first, self.again = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.first(x).relu()
            for _ in range(3):  # tied weights count once
                h = self.again(h).relu()
            return self.head(h + self.skip(x))

    assert size_of(classifier(mlp(3, 7, 5, 2)), X, Y) == (6, 12)
    assert size_of(classifier(Net()), X, Y) == (6, 4 + 4 + 4)


def test_convolutions_count_by_channels_and_embeddings_by_features():
    images = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2))
    assert size_of(classifier(images), torch.zeros(6, 1, 4, 4), Y) == (6, 6)
    turned = nn.Sequential(nn.ConvTranspose2d(1, 6, 3), nn.Flatten(), nn.Linear(216, 2))
    assert size_of(classifier(turned), torch.zeros(6, 1, 4, 4), Y) == (6, 6)
    words = nn.Sequential(nn.Embedding(9, 5), nn.Flatten(), nn.Linear(10, 2))
    assert size_of(classifier(words), torch.zeros(6, 2, dtype=torch.long), Y) == (6, 5)


def test_a_plain_program():
    def model(x, y):
        a = pyro.sample("a", dist.Normal(torch.zeros(3, 8), 1.0).to_event(2))
        b = pyro.sample("b", dist.Normal(torch.zeros(8), 1.0).to_event(1))
        with pyro.plate("data", 40, subsample_size=len(x)):
            pyro.sample("y", dist.Normal((x @ a).tanh() @ b, 1.0), obs=y)

    assert size_of(model, X, torch.zeros(6)) == (40, 8)
    with pytest.raises(ValueError, match="the program observes nothing: pass its targets"):
        size_of(lambda x: model(x, None), X)


def test_a_program_without_hidden_neurons_is_refused():
    with pytest.raises(UnsupportedProgramError, match="no hidden neurons"):
        size_of(classifier(nn.Linear(3, 2)), X, Y)
    with pytest.raises(UnsupportedProgramError, match="no hidden layer"):
        temperature.overparameterized(1.0, classifier(nn.Linear(3, 2), num_data=6))


@pytest.mark.parametrize("bad", [0.0, -0.1, math.nan, math.inf])
def test_bad_tau(bad):
    with pytest.raises(ValueError, match="positive finite"):
        temperature.overparameterized(bad, 1, 1)


def test_bad_numbers():
    with pytest.raises(ValueError, match="at least 1"):
        temperature.overparameterized(1.0, 0, 5)
    with pytest.raises(ValueError, match="num_data must be a whole number, got nan"):
        temperature.overparameterized(1.0, math.nan, 5)

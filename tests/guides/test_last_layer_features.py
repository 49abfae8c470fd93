"""The features of a last layer, however its product is written: their product with the weights'
coefficients is the layer's output."""

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.last_layer import read_features

D = torch.float64
X = torch.randn(6, 3, dtype=D, generator=torch.Generator().manual_seed(0))
SHAPES = {"w": (2, 3), "b": (2,)}


def program(function):
    def model(x):
        values = {
            name: pyro.sample(name, dist.Normal(torch.zeros(shape, dtype=D), 1.0).to_event())
            for name, shape in SHAPES.items()
        }
        pyro.deterministic("f", function(x.tanh(), **values))

    return model


def read(function):
    generator = torch.Generator().manual_seed(1)
    values = {
        name: torch.randn(shape, dtype=D, generator=generator, requires_grad=True)
        for name, shape in SHAPES.items()
    }
    _, features = read_features(program(function), values, list(SHAPES), (X,), {})
    return values, features


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: F.linear(x, w, b),
        lambda x, w, b: F.linear(x, w[:]) + b,
        lambda x, w, b: b + x @ w.T,
        lambda x, w, b: Tensor.__rmatmul__(w.T, x).add(b),
        lambda x, w, b: torch.addmm(b, x, w.mT),
        lambda x, w, b: b.add(torch.einsum("oi,bi->bo", w, x)),
    ],
)
def test_features_times_coefficients_are_the_output(function):
    values, features = read(function)
    assert sorted(features.sites) == ["b", "w"] and features.phi.shape == (6, 4)
    with torch.no_grad():
        expected = function(X.tanh(), **values)
        found = features.phi @ features.coefficients(values).mT
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(features.terms[-1].output, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: (w @ x.T).T + b,
        lambda x, w, b: x @ w.T - b,
        lambda x, w, b: torch.addmm(b, x, w.T, beta=2),
        lambda x, w, b: torch.add(x @ w.T, b, alpha=2),
        lambda x, w, b: F.linear(x[None], w, b)[0],
        lambda x, w, b: (x @ w.T) * b,
    ],
)
def test_other_operations_are_refused_by_name(function):
    with pytest.raises(UnsupportedProgramError, match=r"'[wb]' enter the operation '\w+'"):
        read(function)

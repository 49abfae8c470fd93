"""Draws that hold NaN or infinity are refused by name and number, and never scored."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_bdl import Samples, compare
from pyro_bdl.comparison.distances import sd_of_draws
from pyro_bdl.errors import UnusableDrawsError

X, Y = torch.zeros(6, 1), torch.linspace(-1, 1, 6)


def shift(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.tensor(0.0), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w.expand(len(x)), 1.0), obs=y)


def roots(x, y=None):
    """f = sqrt(w), NaN for negative draws."""
    w = pyro.sample("w", dist.Normal(torch.tensor(1.0), 1.0))
    f = pyro.deterministic("f", w.sqrt().expand(len(x)))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, 1.0), obs=y)


def classes(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.tensor(1.0), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=w.sqrt().expand(len(x))), obs=y)


def heavy(x, y=None):
    """The mean of a Cauchy is NaN for all latents; its draws are finite."""
    w = pyro.sample("w", dist.Normal(torch.tensor(0.0), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Cauchy(w.expand(len(x)), 1.0), obs=y)


def draws(bad=None):
    values = torch.rand(2, 20) + 0.5
    if bad is not None:
        values[1, 3] = bad
    return Samples({"w": values})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_latents_that_are_not_finite(bad):
    posteriors = {"good": draws(), "odd": draws(bad)}
    with pytest.raises(UnusableDrawsError) as raised:
        compare(shift, posteriors, X, Y, reference="good")
    assert raised.value.posterior == "odd"
    said = str(raised.value)
    assert "posterior 'odd': 1 of 40 draws (the first is number 23, counted from 0)" in said
    assert "values of the site 'w'" in said


@pytest.mark.parametrize("program, y", [(roots, Y), (classes, (Y > 0).float())])
def test_finite_latents_that_give_nan(program, y):
    compare(program, {"good": draws()}, X, y, reference=None)
    with pytest.raises(UnusableDrawsError, match="posterior 'odd': 1 of 40 draws"):
        compare(program, {"odd": draws(-1.0)}, X, y, reference=None)


def test_a_distribution_without_a_mean_is_no_fault_of_the_draws():
    found = compare(heavy, {"a": draws(), "b": draws()}, X, Y, reference="b").numbers()
    assert found["a"]["nlpd"] > 0 and found["a"]["crps"] > 0 and "rmse" not in found["a"]


def test_an_sd_of_nan_is_not_zero():
    values = torch.tensor([[0.0, 1.0, 3.0], [float("nan"), 1.0, 5.0]])
    assert torch.equal(sd_of_draws(values)[1:], torch.tensor([0.0, 1.0]).double())
    assert sd_of_draws(values)[0].isnan()

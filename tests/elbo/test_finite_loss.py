"""Losses that are not finite are found before an optimizer can step."""

import math

import pyro
import pytest
import torch

from pyro_bdl.elbo import TemperedTrace_ELBO
from pyro_bdl.elbo.finite_loss import OnHost, at_end_of_backward, guarded
from pyro_bdl.guides import AutoMeanField


def _blame(calls):
    def check_data():
        calls.append(1)
        raise ValueError("row 3")

    return check_data


def test_a_loss_that_is_not_finite_asks_for_the_data():
    calls = []
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="row 3"):
            guarded(torch.tensor(bad), _blame(calls))
    good = torch.tensor(1.0)
    assert guarded(good, _blame(calls)) is good and len(calls) == 2
    torch.vmap(lambda loss: guarded(loss, _blame(calls)))(torch.tensor([1.0, math.nan]))
    assert len(calls) == 2


def test_an_error_at_the_end_of_backward_is_backwards():
    """As on an accelerator, whose loss is known only then."""
    w = torch.tensor(2.0, requires_grad=True)
    loss = w * math.nan
    number, calls = OnHost(loss), []
    check = _blame(calls)
    at_end_of_backward(loss, lambda: check() if not number.value().isfinite() else None)
    assert not calls
    with pytest.raises(ValueError, match="row 3"):
        loss.backward()
    other = w * 1.0
    at_end_of_backward(other, lambda: calls.append(w.grad.clone()))
    w.grad = None
    other.backward()
    assert calls[-1] == 1.0  # after all gradients


def test_a_loss_on_an_accelerator_is_checked_by_backward(device):
    def model(x, y):
        w = pyro.sample("w", pyro.distributions.Normal(torch.zeros((), device=device), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", pyro.distributions.Normal(w * x, 1.0), obs=y)

    x, y = torch.randn(8, device=device), torch.randn(8, device=device)
    guide = AutoMeanField(model).prototype(x, y)
    loss = TemperedTrace_ELBO()(model, guide)
    loss(x, y).backward()
    with pytest.raises(ValueError, match="y holds NaN or infinity in rows 2"):
        loss(x, y.index_fill(0, torch.tensor(2, device=device), math.nan)).backward()

"""Bad data are named; masks and moving supports are no bad data."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

from pyro_bdl.elbo import TemperedTrace_ELBO
from pyro_bdl.guides import AutoMeanField
from pyro_bdl.handlers import temper, with_prior
from pyro_bdl.program import record
from pyro_bdl.program.supports import check_support
from pyro_bdl.program.validation import check_finite


def test_a_support_that_moves_with_a_latent_is_no_fault_of_the_data():
    def program(y):
        top = pyro.sample("top", dist.LogNormal(torch.tensor(0.0), 0.1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Uniform(0.0, top), obs=y)

    run = record(program, {"top": torch.tensor(1.0)}, (torch.tensor([0.5, 2.0]),))
    check_support(run)


def test_masked_targets_may_lie_anywhere():
    def program(y, mask):
        rate = pyro.sample("rate", dist.Gamma(torch.tensor(1.0), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson(rate).mask(mask), obs=y)

    y, mask = torch.tensor([1.0, -1.0, -1.0]), torch.tensor([True, False, True])
    with pytest.raises(ValueError, match="in rows 2: correct"):
        check_support(record(program, {}, (y, mask)))
    check_support(record(program, {}, (y[:2], mask[:2])))


def test_additive_masks_are_no_bad_data():
    def program(x, mask, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        attention = (x @ x.mT + mask).softmax(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(attention @ x @ w, 1.0), obs=y)

    x, y = torch.randn(4, 2), torch.randn(4)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(4)
    svi = SVI(program, AutoMeanField(program), pyro.optim.Adam({}), TemperedTrace_ELBO())
    assert math.isfinite(svi.step(x, mask, y))
    with_nan = mask.index_fill(0, torch.tensor(1), torch.nan)
    for bad in (-mask, with_nan, mask + 1.0, torch.full_like(mask, -math.inf)):
        with pytest.raises(ValueError, match="mask holds NaN or infinity"):
            check_finite(program, (x, bad, y), {})


def test_data_are_named_through_handlers():
    def program(x):
        pyro.sample("w", dist.Normal(torch.zeros(()), 1.0))

    x = torch.tensor([0.0, math.nan])
    posterior = AutoMeanField(program).prototype(x)
    for handled in (temper(program, 0.5), with_prior(program, posterior)):
        with pytest.raises(ValueError, match="x holds NaN or infinity in rows 1"):
            check_finite(handled, (x,), {})


def test_values_that_a_mask_leaves_out_must_be_numbers():
    y = torch.tensor([1.0, float("nan")])
    with pytest.raises(ValueError, match=r"y holds NaN .*where a mask leaves them out"):
        check_finite(lambda y: None, (y,), {})

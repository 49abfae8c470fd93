"""Which guides the natural-gradient optimizers move, and what their copies move."""

import copy
import gc

import pytest
import torch
from torch import nn

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.guides import AutoMeanField
from pyro_bdl.optim import IVON, VOGN, GaussNewton_ELBO

PAIRS = [(IVON, TemperedTraceMeanField_ELBO), (VOGN, GaussNewton_ELBO)]


def _problem():
    x = torch.randn(20, 2)
    model = models.Regression(bayesianize(nn.Linear(2, 1), priors.Normal(1.0)), noise=0.3)
    return model, (x, x.sum(1))


@pytest.mark.parametrize(("optimizer", "elbo"), PAIRS)
def test_a_copy_moves_the_copied_guide(optimizer, elbo):
    model, data = _problem()
    guide = AutoMeanField(model).prototype(*data)
    optimizer = optimizer(guide)

    def step(model, guide, optimizer):
        optimizer.zero_grad()
        elbo()(model, guide)(*data).backward()
        optimizer.step()

    step(model, guide, optimizer)
    clone = copy.deepcopy({"guide": guide, "optimizer": optimizer})
    assert clone["optimizer"].guide is clone["guide"]
    before = guide.loc.detach().clone()
    torch.manual_seed(1)
    step(model, *clone.values())
    assert torch.equal(guide.loc, before) and not torch.equal(clone["guide"].loc, before)
    torch.manual_seed(1)
    step(model, guide, optimizer)
    assert torch.equal(guide.loc, clone["guide"].loc)
    assert torch.equal(guide.scale, clone["guide"].scale)


def test_an_optimizer_that_is_gone_leaves_no_hook():
    model, data = _problem()
    guide = AutoMeanField(model).prototype(*data)
    kept = IVON(guide)
    for _ in range(3):
        copy.deepcopy({"guide": guide, "optimizer": IVON(guide)})
    gc.collect()
    assert len(guide.loc._post_accumulate_grad_hooks) == 1
    del kept
    gc.collect()
    assert not guide.loc._post_accumulate_grad_hooks


@pytest.mark.parametrize(("optimizer", "elbo"), PAIRS)
def test_a_warm_up_may_start_at_a_learning_rate_of_zero(optimizer, elbo):
    """The first step moves nothing, and the later ones do."""
    model, data = _problem()
    guide = AutoMeanField(model).prototype(*data)
    optimizer = optimizer(guide)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)
    vectors = []
    for _ in range(3):
        vectors.append((guide.loc.detach().clone(), guide.scale.detach().clone()))
        optimizer.zero_grad()
        elbo()(model, guide)(*data).backward()
        optimizer.step()
        schedule.step()
    for first, second, third in zip(*vectors, strict=True):
        torch.testing.assert_close(first, second)
        assert not torch.equal(second, third)

"""Which guides the natural-gradient optimizers move, and what their copies move."""

import copy

import pytest
import torch
from torch import nn

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.elbo import CompiledELBO, Step, TemperedTraceMeanField_ELBO
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
        step = elbo().take_step(model, guide, *data)
        step.backward()
        optimizer.step(step)

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


def test_nothing_is_left_at_the_guide():
    model, data = _problem()
    guide = AutoMeanField(model).prototype(*data)
    objective = TemperedTraceMeanField_ELBO()(model, guide)
    objective(*data)
    before = set(vars(guide))
    optimizer, step = IVON(guide), objective.take_step(*data)
    step.backward()
    optimizer.step(step)
    assert set(vars(guide)) == before
    assert not guide.loc._post_accumulate_grad_hooks and not guide.loc._backward_hooks


@pytest.mark.parametrize(("optimizer", "elbo"), PAIRS)
def test_a_step_without_that_of_the_elbo_is_refused(optimizer, elbo):
    """Its temperature would be a guess; the guide stays as it was."""
    model, data = _problem()
    guide = AutoMeanField(model).prototype(*data)
    optimizer, before = optimizer(guide), guide.loc.detach().clone()
    loss = elbo(temperature=0.1)(model, guide)(*data)
    loss.backward()
    with pytest.raises(RuntimeError, match="needs the ELBO's step"):
        optimizer.step()
    assert torch.equal(guide.loc, before)
    optimizer.step(Step(loss, temperature=0.1))
    assert not torch.equal(guide.loc, before)


@pytest.mark.parametrize("compiled", [False, True])
def test_backward_adds_what_the_losses_backward_adds(compiled):
    """Times a factor, to gradients that are there, and past hooks."""
    model, data = _problem()
    guide = AutoMeanField(model).prototype(*data)
    elbo = CompiledELBO() if compiled else TemperedTraceMeanField_ELBO()
    objective, seen, found = elbo(model, guide), [], []
    for _ in range(8):  # the next comparison of a graph is at step 16
        objective(*data)
    handle = guide.loc.register_hook(lambda gradient: seen.append(gradient.sum().item()))
    for by_step in (True, False):
        guide.zero_grad()
        for seed in (1, 2):
            torch.manual_seed(seed)
            if by_step:
                objective.take_step(*data).backward(0.25)
            else:
                (0.25 * objective(*data)).backward()
        found.append([p.grad.clone() for p in guide.parameters()])
    handle.remove()
    assert seen[:2] == pytest.approx(seen[2:]) and len(seen) == 4
    torch.testing.assert_close(*found)


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
        step = elbo().take_step(model, guide, *data)
        step.backward()
        optimizer.step(step)
        schedule.step()
    for first, second, third in zip(*vectors, strict=True):
        torch.testing.assert_close(first, second)
        assert not torch.equal(second, third)

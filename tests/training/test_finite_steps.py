"""Steps whose loss or gradient is not finite change nothing."""

import math

import pyro
import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning, FailedStepError
from pyro_bdl.training import train
from pyro_bdl.training.descent import Descent

pytestmark = pytest.mark.usefixtures("double")


def data():
    x = torch.linspace(-1, 1, 24)[:, None]
    return x, torch.sin(3 * x)


def program():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))
    return bdl.models.Regression(bdl.bayesianize(net), noise=0.3, num_data=24)


def numbers(*modules):
    return [v.clone() for m in modules for v in m.state_dict().values() if torch.is_tensor(v)]


def minimized(loss, optimizer):
    """The loss of a program without data."""

    class Loss(pyro.infer.Trace_ELBO):
        def differentiable_loss(self, model, guide, rows):
            return loss()

    objective = Loss()(lambda rows: None, lambda rows: None)
    return Descent(objective, optimizer, (torch.zeros(1),), 1)


@pytest.mark.parametrize(
    "loss, reason",
    [
        (lambda w: (w - w).sqrt().sum(), "step 0: the gradient is not finite"),
        (lambda w: w.sum() / 0.0, "step 0: the loss is inf"),
    ],
)
def test_loss_and_gradient_are_both_read(loss, reason):
    weight = nn.Parameter(torch.ones(2))
    descent = minimized(lambda: loss(weight), torch.optim.SGD([weight], 0.1))
    with pytest.raises(FailedStepError, match=reason):
        descent.step(0)
    assert weight.tolist() == [1.0, 1.0]


def test_large_finite_gradients_are_taken():
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    descent = minimized(lambda: (6e4 * weight).max(), torch.optim.SGD([weight], 1e-5))
    descent.step(0)
    assert len(descent.losses) == 1 and descent.losses[0].isfinite()
    assert (weight < 1).any()


class _Hole(bdl.elbo.TemperedTraceMeanField_ELBO):
    """The bound, but NaN at some steps."""

    def __init__(self, holes):
        super().__init__()
        self.holes, self.calls = holes, 0

    def differentiable_loss(self, model, guide, *args):
        self.calls += 1
        loss = super().differentiable_loss(model, guide, *args)
        return loss * math.nan if self.calls - 1 in self.holes else loss


def test_train_raises_or_skips():
    x, y = data()
    model = program()
    guide = bdl.guides.AutoMeanField(model)
    settings = {"steps": 12, "batch_size": 5}
    with pytest.raises(
        FailedStepError, match=r"step 7, rows \d+(, \d+)+: the loss is nan: the par"
    ):
        train(model, guide, x, y, elbo=_Hole({7}), **settings)
    assert all(value.isfinite().all() for value in numbers(model, guide))
    skipping = {"on_nonfinite": "skip", **settings}
    with pytest.warns(BdlWarning, match="step 7, rows .*: the loss is nan: the step is left out"):
        run = train(model, guide, x, y, elbo=_Hole({7}), **skipping)
    assert run.skipped == (7,) and len(run.losses) == 11 and run.losses.isfinite().all()
    assert repr(run).endswith("1 skipped)")
    with (
        pytest.warns(BdlWarning, match="left out"),
        pytest.raises(FailedStepError, match="the last of 10 in a row"),
    ):
        train(model, guide, x, y, elbo=_Hole(range(99)), **skipping)
    assert all(value.isfinite().all() for value in numbers(model, guide))
    with pytest.raises(ValueError, match="on_nonfinite must be one of 'raise', 'skip', got 'hope'"):
        train(model, guide, x, y, on_nonfinite="hope", **settings)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_the_data_at_fault_are_named_and_statistics_are_not_left_broken(policy):
    x, y = data()
    model = program()
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    objective = bdl.elbo.TemperedTraceMeanField_ELBO()(model, guide)
    optimizer = torch.optim.Adam(objective.parameters())
    descent = Descent(objective, optimizer, (x, y), 24, on_nonfinite=policy)
    descent.step(0)
    before = numbers(guide)
    reason = "step 1: the loss is nan, since .*x holds NaN or infinity in rows 3"
    with pytest.raises(FailedStepError, match=reason):
        x.index_fill_(0, torch.tensor([3]), math.nan)
        descent.step(1)
    assert all(map(torch.equal, numbers(guide), before))

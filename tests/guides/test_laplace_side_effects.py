"""Laplace approximations leave the user's network, modes and statistics as they were."""

import math

import pyro
import pytest
import torch
from helpers.conjugate_laplace import D
from torch import nn

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.guides import AutoLaplaceGGN

# Nothing of the user's is changed


class Counting(nn.Module):
    """BatchNorm, dropout, a hook's victim, and a switch that breaks it."""

    def __init__(self, **norm):
        super().__init__()
        self.first = nn.Linear(2, 4)
        self.norm = nn.BatchNorm1d(4, **norm)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(4, 1)
        self.calls, self.limit = 0, math.inf

    def forward(self, x):
        self.calls += 1
        if self.calls > self.limit:
            raise RuntimeError("midway")
        return self.second(self.drop(torch.relu(self.norm(self.first(x)))))


def unchanged(model):
    """A check that everything in a model is as it was."""
    modes = [part.training for part in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()]
    every = len(nn.modules.module._global_forward_pre_hooks)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    names = [name for name, _ in model.named_parameters()]
    requires = [value.requires_grad for value in (*model.parameters(), *model.buffers())]

    def check():
        assert [part.training for part in model.modules()] == modes
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert hooks == [
            (len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()
        ]
        assert len(nn.modules.module._global_forward_pre_hooks) == every
        assert all((parameter.grad == 7.0).all() for parameter in model.parameters())
        assert [name for name, _ in model.named_parameters()] == names
        assert requires == [v.requires_grad for v in (*model.parameters(), *model.buffers())]
        assert not pyro.poutine.runtime._PYRO_STACK
        assert not torch.overrides._get_current_function_mode_stack()

    return check


def noisy_model(noise=0.5, **norm):
    torch.manual_seed(0)
    net = Counting(**norm).double().train()
    x, y = torch.randn(8, 2, dtype=D), torch.randn(8, dtype=D)
    with torch.no_grad():
        net(3 * x + 1)  # running statistics of their own
    learnable = priors.ByName({"norm.*": None, "*": priors.Normal(1.0)})
    return models.Regression(bayesianize(net, learnable), noise=noise), x, y


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_layers_in_training_mode_are_evaluated(structure, curvature):
    if curvature == "hessian" and structure != "full":
        return
    model, x, y = noisy_model(noise=10.0)
    guide = AutoLaplaceGGN(model, structure=structure, curvature=curvature).prototype(x, y)
    check = unchanged(model)
    options = {"structure": structure, "curvature": curvature}
    laplace = guide.laplace_approximation((x, y), **options)
    check()
    laplace.refresh()
    check()
    again = guide.laplace_approximation((x, y), **options)  # no dropout masks
    torch.testing.assert_close(again.variances(), laplace.variances(), rtol=0, atol=0)
    model.eval()
    torch.testing.assert_close(
        guide.laplace_approximation((x, y), **options).variances(), laplace.variances()
    )


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
def test_an_error_midway_leaves_no_trace(structure):
    model, x, y = noisy_model()
    guide = AutoLaplaceGGN(model, structure=structure).prototype(x, y)
    net = model.network.network
    guide.laplace_approximation([(x, y)] * 2)  # which warns once
    net.calls = 0
    guide.laplace_approximation([(x, y)] * 2)
    needed = net.calls
    check = unchanged(model)
    for limit in range(needed):
        net.calls, net.limit = 0, limit
        if limit == 0 or limit == needed - 1 or limit == needed // 2:
            with pytest.raises(RuntimeError, match="midway"):
                guide.laplace_approximation([(x, y)] * 2)
        check()
    net.limit = math.inf
    guide.laplace_approximation((x, y))
    check()


def test_batch_statistics_by_function_are_refused():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 1)
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            x = nn.functional.batch_norm(x, None, None, self.weight, training=True)
            return self.linear(x)

    model = models.Regression(bayesianize(Functional().double()), noise=0.5)
    x, y = torch.randn(5, 2, dtype=D), torch.randn(5, dtype=D)
    guide = AutoLaplaceGGN(model).prototype(x, y)
    check = unchanged(model)
    with pytest.raises(ValueError, match="makes data depend on each other"):
        guide.laplace_approximation((x, y))
    check()


def test_batchnorm_without_running_statistics_is_refused():
    _, x, y = noisy_model()
    net = Counting(track_running_stats=False).double()
    model = models.Regression(bayesianize(net), noise=0.5)
    with pytest.raises(ValueError, match="track_running_stats=True"):
        AutoLaplaceGGN(model).laplace_approximation((x, y))

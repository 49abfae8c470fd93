"""The choice of backend="auto": steps in torch where there are none in JAX."""

import numpy as np
import pytest
import torch
from helpers.trainings import (
    OPTIMIZERS,
    check_same_trajectory,
    data,
    network,
    of_program,
    optimized,
    program,
    run,
    with_guide,
)
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning
from pyro_bdl.training import svi, train

pytestmark = pytest.mark.usefixtures("double")


class OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Straight(nn.Module):
    def forward(self, x):
        return OwnGradient.apply(x)


class Counter(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Branch(nn.Module):
    def forward(self, x):
        return 2 * x if torch.rand(()) < 0.5 else x


class Clipped(nn.Module):
    def forward(self, x):
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return x


class Numpy(nn.Module):
    def forward(self, x):
        return x + np.random.normal()


class Airy(nn.Module):
    def forward(self, x):
        return torch.special.airy_ai(x.detach()) + x


def closure():
    calls = []

    class Layer(nn.Module):
        def forward(self, x):
            calls.append(1)
            return x * (1.0 + 1e-6 * len(calls))

    return network(Layer())


def with_hook(register):
    """A MAP guide under SGD, one of which has a hook."""

    def made():
        model, guide, own = OPTIMIZERS["SGD"]()
        register(guide.loc, own["optimizer"])
        return model, guide, own

    return made


def clamp(optimizer, *_):
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].clamp_(-0.1, 0.1)


WITHOUT_STEPS = {
    "running_mean|batch_norm|in place": with_guide(
        bdl.guides.AutoMAP, lambda: network(nn.BatchNorm1d(5))
    ),
    "airy": with_guide(bdl.guides.AutoMAP, lambda: network(Airy())),
    "OwnGradient": with_guide(bdl.guides.AutoMAP, lambda: network(Straight())),
    "each run changes Counter.calls": with_guide(bdl.guides.AutoMAP, lambda: network(Counter())),
    "keeps a counter": with_guide(bdl.guides.AutoMAP, closure),
    "reads numbers .* in line": with_guide(bdl.guides.AutoMAP, lambda: network(Branch())),
    "register_hook: it changes gradients in line": with_guide(
        bdl.guides.AutoMAP, lambda: network(Clipped())
    ),
    "a hook on its gradient": with_hook(
        lambda loc, _: loc.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    ),
    "the optimizer has hooks": with_hook(
        lambda _, optimizer: optimizer.register_step_post_hook(clamp)
    ),
    "or draws with numpy": with_guide(bdl.guides.AutoMAP, lambda: network(Numpy())),
    "RMSprop": optimized(torch.optim.RMSprop),
    "amsgrad": optimized(torch.optim.Adam, amsgrad=True),
}


@pytest.mark.parametrize(
    "register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]
)
def test_hooks_of_all_optimizers_are_called(register):
    with (
        register(clamp),
        pytest.warns(BdlWarning, match="steps in torch: .*the optimizer has hooks"),
    ):
        check_same_trajectory(OPTIMIZERS["SGD"], data(), steps=12, rtol=0.0)
    check_same_trajectory(OPTIMIZERS["SGD"], data(), steps=12)


@pytest.mark.parametrize("reason", WITHOUT_STEPS)
def test_other_trainings_are_those_of_torch(reason):
    made = WITHOUT_STEPS[reason]
    with pytest.warns(BdlWarning, match=f"steps in torch: .*({reason})"):
        if reason in (
            "each run changes Counter.calls", "keeps a counter", "or draws with numpy"
        ):  # fmt: skip
            run("jax", *made()[:2], *data(), steps=12)
        else:
            check_same_trajectory(made, data(), steps=12, rtol=0.0)


def convolutions():
    net = nn.Sequential(nn.Unflatten(1, (1, 1)), nn.Conv1d(1, 2, 1), nn.Flatten(), nn.Linear(2, 1))
    return program(net)


AUTOMATIC = {  # the training, its steps, the backend that "auto" is, and its warning
    "many steps": (with_guide(bdl.guides.AutoMeanField), 20, "jax", None),
    "few steps": (with_guide(bdl.guides.AutoMeanField), 19, "torch", None),
    "convolutions": (of_program(convolutions), 20, "torch", None),
    "another optimizer": (optimized(torch.optim.RMSprop), 20, "torch", None),
    "no translation": (WITHOUT_STEPS["airy"], 20, "torch", "airy"),
}


@pytest.mark.parametrize("name", AUTOMATIC)
def test_automatic_choice(name, monkeypatch, recwarn):
    monkeypatch.setattr(svi, "_WORTH_COMPILING", 20)
    made, steps, backend, reason = AUTOMATIC[name]
    losses = []
    for chosen in ("auto", backend):
        torch.manual_seed(0)
        model, guide, options = made()
        losses.append(run(chosen, model, guide, *data(), steps=steps, **options)[0].losses)
    assert torch.equal(*losses)
    assert [reason in str(w.message) for w in recwarn] == ([] if reason is None else [True])


def test_another_backend_is_refused():
    model = program()
    with pytest.raises(ValueError, match="backend must be one of 'torch', 'jax', 'auto'"):
        train(model, bdl.guides.AutoMAP(model), *data(), steps=1, backend="tensorflow")

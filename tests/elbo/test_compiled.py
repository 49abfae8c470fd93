"""The compiled ELBO gives the losses and gradients of the plain one, step by step, and says where
it cannot."""

import copy
import math
import random

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.compiled_steps import (
    BOUNDS,
    GUIDES,
    SCHEDULE,
    X,
    Y,
    _cases,
    num_replays,
    regression,
    regression_with,
    same_steps,
)
from pyro.infer.autoguide import AutoNormal
from torch import nn

from pyro_bdl import bayesianize, models
from pyro_bdl.elbo import CompiledELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import (
    AutoLaplaceGGN,
    AutoLastLayer,
    AutoMCDropout,
    AutoMeanField,
)
from pyro_bdl.handlers import temper
from pyro_bdl.optim import GaussNewton_ELBO

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize(
    ("num_particles", "kind"),
    _cases(  # others are trained as the MAP is, by the same code
        [1, 3], GUIDES,
        lambda n, kind: kind in (AutoMeanField, AutoMCDropout)
        or (n == 1 and kind not in (AutoLaplaceGGN, AutoLastLayer)),
    ),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*#members")  # a member in each step
def test_every_guide(kind, num_particles):
    options = {"temperature": SCHEDULE, "num_particles": num_particles}
    elbo, _ = same_steps(options, [(X, Y)] * 5, kind=kind)
    assert elbo.num_traces == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    _cases(
        BOUNDS, [AutoMeanField, AutoNormal],
        lambda name, kind: kind is AutoMeanField or name in ("sampled", "local"),
    ),
)  # fmt: skip
def test_every_bound_and_estimator(kind, name):
    same_steps(BOUNDS[name], [(X, Y)] * 5, kind=kind)


def test_dropout_for_every_datum():
    same_steps({"estimator": "per_example_dropout"}, [(X, Y)] * 5, kind=AutoMCDropout)


def _torch_loop(elbo, steps=5, loss_of=lambda loss: loss):
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    model = regression()
    guide = AutoMeanField(model).prototype(X, Y)
    pair = elbo(model, guide)
    adam = torch.optim.Adam(pair.parameters(), lr=0.05)
    losses, gradients = [], []
    for _ in range(steps):
        adam.zero_grad()
        loss = loss_of(pair(X, Y))
        loss.backward()
        losses.append(loss.detach())
        gradients.append(torch.cat([p.grad.clone() for p in guide.parameters()]))
        adam.step()
    return torch.stack(losses), torch.stack(gradients)


@pytest.mark.parametrize("loss_of", [lambda loss: loss, lambda loss: 0.5 * loss + 1.0])
def test_torchs_loop(loss_of):
    elbo = CompiledELBO()
    for ours, theirs in zip(
        _torch_loop(elbo, loss_of=loss_of),
        _torch_loop(TemperedTraceMeanField_ELBO(), loss_of=loss_of),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    assert elbo.num_replays == num_replays(5)


@pytest.mark.parametrize("take", ["loss_and_grads", "differentiable_loss"])
def test_a_hook_of_a_parameter_is_called_once_in_each_step(take):
    """In steps of the program, of the graph, and in those that compare both."""
    model = regression()
    guide = AutoMeanField(model).prototype(X, Y)
    loc, calls = guide.get_parameter("loc"), []
    elbos = TemperedTraceMeanField_ELBO(), CompiledELBO()

    def gradient(elbo, seed):
        torch.manual_seed(seed)
        loc.grad = None
        loss = getattr(elbo, take)(model, guide, X, Y)
        if take == "differentiable_loss":
            loss.backward()
        return loc.grad

    plain = [gradient(elbos[0], seed) for seed in range(5)]
    loc.register_hook(lambda gradient: calls.append(0) or 3.0 * gradient)
    for seed in range(5):
        torch.testing.assert_close(gradient(elbos[1], seed), 3.0 * plain[seed])
    assert len(calls) == 5 and elbos[1].num_replays == num_replays(5)


def test_arguments_with_gradients():
    """Such as features that a network outside of the program computes."""
    encoder = nn.Linear(2, 2)
    model = regression()
    guide = AutoMeanField(model).prototype(X, Y)
    elbos = TemperedTraceMeanField_ELBO(), CompiledELBO()
    for _ in range(4):
        gradients = []
        for elbo in elbos:
            torch.manual_seed(7)
            encoder.zero_grad()
            elbo(model, guide)(encoder(X), Y).backward()
            gradients.append(encoder.weight.grad.clone())
        torch.testing.assert_close(*gradients)
        with torch.no_grad():
            encoder.weight.add_(0.1)
    assert elbos[1].num_replays == num_replays(4)


# Arguments


def test_another_shape_is_traced_anew():
    batches = [(X[:4], Y[:4]), (X[4:], Y[4:])] * 4
    elbo, _ = same_steps(
        {}, batches, make=lambda: regression(num_data=6), replays=2 * num_replays(4)
    )
    assert elbo.num_traces == 2


@pytest.mark.filterwarnings("ignore:.*#number-of-data")
def test_too_many_shapes_run_uncompiled():
    model = regression()
    guide = AutoMeanField(model).prototype(X, Y)
    elbo = CompiledELBO(max_graphs=2)
    many = torch.randn(20, 2)
    for rows in (2, 3):
        elbo.loss_and_grads(model, guide, many[:rows], many[:rows, 0])
    with pytest.warns(BdlWarning, match="more than 2 shapes"):
        elbo.loss_and_grads(model, guide, many, many[:, 0])
    assert elbo.num_traces == 2
    other = AutoMeanField(model).prototype(X, Y)  # another pair takes their place
    for _ in range(3):
        elbo.loss_and_grads(model, other, X, Y)
    assert (elbo.num_traces, elbo.num_replays) == (3, 1)


def nested(data, scale=1.0, *, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(data["x"] @ w, scale), obs=y)


def test_nested_and_keyword_arguments():
    guide = AutoMeanField(nested).prototype({"x": X}, y=Y)
    plain, elbo = TemperedTraceMeanField_ELBO(), CompiledELBO()
    for scale in (1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0):
        losses = []
        for bound in (plain, elbo):
            torch.manual_seed(1)
            losses.append(bound.loss_and_grads(nested, guide, {"x": X}, scale, y=Y))
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert (elbo.num_traces, elbo.num_replays) == (2, 2)


def test_the_same_tensor_twice_is_two_arguments():
    def model(a, b):
        w = pyro.sample("w", dist.Normal(torch.tensor(0.0), 1.0))
        pyro.sample("y", dist.Normal(w * a.sum(), 1.0), obs=b.sum())

    guide = AutoMeanField(model).prototype(X, X)
    plain, elbo = TemperedTraceMeanField_ELBO(), CompiledELBO()
    for _ in range(3):
        elbo.loss_and_grads(model, guide, X, X)
    losses = []
    for bound in (plain, elbo):
        torch.manual_seed(1)
        losses.append(bound.loss_and_grads(model, guide, X, 3.0 * X))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


class Wrapped:
    def __init__(self, x):
        self.x = x


def test_an_argument_that_holds_tensors_unseen_is_refused():
    def model(data):
        w = pyro.sample("w", dist.Normal(torch.tensor(0.0), 1.0))
        pyro.sample("y", dist.Normal(w, 1.0), obs=data.x.sum())

    guide = AutoMeanField(model).prototype(Wrapped(X))
    elbo = CompiledELBO()
    with pytest.warns(BdlWarning, match="an argument holds Wrapped"):
        elbo.loss_and_grads(model, guide, Wrapped(X))
    assert math.isfinite(elbo.loss_and_grads(model, guide, Wrapped(X)))  # said once
    assert elbo.num_traces == 0


def test_bad_data_are_named_as_by_the_plain_elbo():
    model = regression()
    guide = AutoMeanField(model).prototype(X, Y)
    elbo = CompiledELBO()
    for _ in range(3):
        elbo.loss_and_grads(model, guide, X, Y)
    gradient = guide.loc.grad.clone()
    bad = X.clone()
    bad[2, 1] = math.nan
    with pytest.raises(ValueError, match="x holds NaN or infinity in rows 2, columns 1"):
        elbo.loss_and_grads(model, guide, bad, Y)
    assert torch.equal(guide.loc.grad, gradient)
    net = nn.Linear(2, 3)
    model = models.Classification(bayesianize(net))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    guide = AutoMeanField(model).prototype(X, labels)
    for _ in range(3):
        elbo.loss_and_grads(model, guide, X, labels)
    with pytest.raises(ValueError, match="outside the support"):
        elbo.loss_and_grads(model, guide, X, labels + 1)


# What is no graph


_NUMBERS = "reads numbers that change from step to step in line .* of test_compiled.py"
_RANDOM = "numpy's or Python's random numbers"


class Changed(nn.Linear):
    def __init__(self, change):
        super().__init__(2, 1)
        self.change = change

    def forward(self, x):
        return self.change(super().forward(x), x)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda f, x: f if f.mean() > 0 else -f, _NUMBERS),
        (lambda f, x: f + torch.tensor(f.tolist()).sum(), _NUMBERS),
        (lambda f, x: f if bool((x > -99).all()) else -f, _NUMBERS),
        (lambda f, x: f + f[f > 0].sum(), "the shape of a tensor depends on numbers"),
        (lambda f, x: f + float(np.random.randn()), _RANDOM),
        (lambda f, x: f * random.random(), _RANDOM),
    ],
)
def test_what_is_no_graph_runs_uncompiled(change, reason):
    def make():
        np.random.seed(1)
        random.seed(1)
        return regression(Changed(change))

    with pytest.warns(BdlWarning, match=reason) as caught:
        same_steps({}, [(X, Y)] * 6, make=make, replays=0)
    assert len([w for w in caught if issubclass(w.category, BdlWarning)]) == 1


def test_a_tensor_computed_outside_is_refused():
    raw = torch.zeros(2, requires_grad=True)
    scale = raw.exp()

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), scale).to_event(1))
        pyro.sample("y", dist.Normal(x @ w, 1.0).to_event(1), obs=y)

    guide = AutoMeanField(model).prototype(X, Y)
    elbo = CompiledELBO()
    with pytest.warns(BdlWarning, match="computed outside"):
        elbo(model, guide)(X, Y)


def test_without_gradients_and_under_autocast_it_is_the_plain_one():
    model = regression()
    guide = AutoMeanField(model).prototype(X, Y)
    elbo, plain = CompiledELBO(0.5), TemperedTraceMeanField_ELBO(0.5)
    for _ in range(4):
        elbo.loss_and_grads(model, guide, X, Y)
    plain.step = elbo.step
    for how in (torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)):
        losses = []
        for bound in (elbo, plain):
            torch.manual_seed(3)
            with how():
                losses.append(bound.differentiable_loss(model, guide, X, Y))
        assert torch.equal(*losses)
    torch.manual_seed(3)
    value = elbo.loss(model, guide, X, Y)
    torch.manual_seed(3)
    assert value == plain.loss(model, guide, X, Y)
    assert elbo.num_replays == 1
    assert elbo.step == plain.step == 6


# The object


def test_copies_begin_anew():
    model = regression()
    guide = AutoMeanField(model).prototype(X, Y)
    elbo = CompiledELBO(0.5)
    for _ in range(3):
        elbo.loss_and_grads(model, guide, X, Y)
    other = copy.deepcopy(elbo)
    assert other.step == 3 and not other.graphs.graphs
    for _ in range(3):
        other.loss_and_grads(model, guide, X, Y)
    assert (other.step, elbo.step) == (6, 3)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"bound": GaussNewton_ELBO}, TypeError, "GaussNewton_ELBO: use that one uncompiled"),
        ({"backend": "jit"}, ValueError, "backend must be one of 'eager', 'inductor'"),
        ({"sticking_the_landing": True}, ValueError, "sticking_the_landing"),
        ({"num_particles": 0}, ValueError, "num_particles"),
        ({"max_graphs": 0}, ValueError, "max_graphs must be at least 1"),
    ],
)
def test_what_is_refused_at_once(options, error, words):
    with pytest.raises(error, match=words):
        CompiledELBO(**options)


def test_a_tempered_program():
    same_steps({}, [(X, Y)] * 5, make=lambda: temper(regression(), 0.1))


# Inductor


@pytest.mark.slow
def test_inductor_with_noise_in_the_network_and_statistics():
    same_steps(
        {"backend": "inductor"},
        [(X, Y)] * 5,
        make=lambda: regression_with(nn.BatchNorm1d(3), nn.Dropout(0.5)),
        rtol=1e-4,
    )


def test_without_a_compiler_the_program_runs_uncompiled(monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr("torch._inductor.compile", fails)
    model = regression()
    guide = AutoMeanField(model).prototype(X, Y)
    elbo = CompiledELBO(backend="inductor")
    with pytest.warns(BdlWarning, match=r"runs the program uncompiled.*No working C\+\+ compiler"):
        elbo.loss_and_grads(model, guide, X, Y)
    elbo.loss_and_grads(model, guide, X, Y)
    assert elbo.num_replays == 0


def test_on_another_device(device):
    batches = [(X.to(device), Y.to(device))] * 6
    same_steps({"temperature": 0.3}, batches, make=lambda: regression().to(device), rtol=1e-4)

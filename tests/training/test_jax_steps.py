"""Steps in JAX are the steps of torch: the same trajectory without noise, the same law with it."""

import gc
import math
import weakref

import jax
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from guides.conftest import one_shift
from helpers.trainings import FAMILIES, data, network, program
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning, FailedStepError
from pyro_bdl.tracing.jax import translate
from pyro_bdl.training import HeldOut, checkpoint, jax_steps, svi, train

pytestmark = pytest.mark.usefixtures("double")


def run(backend, model, guide, *args, seed=3, **options):
    """The losses, and all numbers of program and guide after the training."""
    pyro.set_rng_seed(seed)
    record = train(model, guide, *args, backend=backend, **options)
    modules = [m for m in (model, guide) if isinstance(m, nn.Module)]
    numbers = [v.clone() for m in modules for v in m.state_dict().values() if torch.is_tensor(v)]
    return record, numbers


def check_same_trajectory(made, args, *, steps=60, rtol=1e-9, **options):
    """Train by both backends, and compare losses and numbers.

    :param made: makes ``(model, guide, options)``; the options may hold an optimizer.
    """
    records = []
    for backend in ("torch", "jax"):
        model, guide, own = made()
        records.append(run(backend, model, guide, *args, steps=steps, **own, **options))
    (ours, numbers), (theirs, others) = records
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=rtol, atol=rtol)
    torch.testing.assert_close(numbers, others, rtol=rtol, atol=rtol)
    return ours, theirs


def optimized(optimizer, **options):
    """A MAP guide whose parameters an optimizer of torch trains."""

    def made():
        model = program()
        guide = bdl.guides.AutoMAP(model).prototype(*data())
        return model, guide, {"optimizer": optimizer(guide.parameters(), **options)}

    return made


OPTIMIZERS = {
    "Adam": optimized(torch.optim.Adam, lr=0.03, betas=(0.8, 0.99), eps=1e-3),
    "Adam with decay": optimized(torch.optim.Adam, lr=0.03, weight_decay=0.2),
    "AdamW": optimized(torch.optim.AdamW, lr=0.03, weight_decay=0.2),
    "SGD": optimized(torch.optim.SGD, lr=1e-3, weight_decay=0.2),
    "momentum": optimized(torch.optim.SGD, lr=1e-4, momentum=0.9),
    "Nesterov": optimized(torch.optim.SGD, lr=1e-4, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trajectories_are_those_of_torchs_optimizers(name):
    check_same_trajectory(OPTIMIZERS[name], data(), batch_size=16)


def test_groups_keep_their_learning_rates():
    def made():
        model = program(noise=pyro.nn.PyroParam(torch.tensor(0.5), dist.constraints.positive))
        guide = bdl.guides.AutoMAP(model).prototype(*data())
        groups = [{"params": guide.parameters(), "lr": 0.05}, {"params": model.parameters()}]
        return model, guide, {"optimizer": torch.optim.Adam(groups, lr=0.002)}

    check_same_trajectory(made, data())


def test_a_second_training_goes_on_from_torchs_state():
    def made():
        model, guide, own = OPTIMIZERS["Adam"]()
        train(model, guide, *data(), steps=7, optimizer=own["optimizer"])
        own["optimizer"].param_groups[0]["lr"] = 0.02
        return model, guide, own

    check_same_trajectory(made, data())


# Programs ---------------------------------------------------------------------------------------


def of_program(make):
    def made():
        model = make()
        return model, bdl.guides.AutoMAP(model), {}

    return made


def learned_scales():
    noise = pyro.nn.PyroParam(torch.tensor(0.5), dist.constraints.positive)
    bnn = bdl.bayesianize(network(), prior=bdl.priors.Normal(1.0))
    return bdl.models.Regression(bnn, noise=noise, num_data=40)


def hierarchy():
    bnn = bdl.bayesianize(network(), prior=bdl.priors.Horseshoe())
    return bdl.models.Regression(bnn, noise=dist.HalfNormal(torch.tensor(1.0)), num_data=40)


def own_statements(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(1), 1.0).to_event(1))
    slope = pyro.param("slope", torch.tensor(0.1))
    s = pyro.sample("s", dist.LogNormal(torch.tensor(0.0), 0.5))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.StudentT(4.0, x @ w + slope * x[:, 0] ** 2, s), obs=y)


class Constant(nn.Module):
    """A layer with a part without gradients, and a detached one."""

    def forward(self, x):
        with torch.no_grad():
            size = x.square().mean()
        return x * size + x.detach() * x


def last_layer():
    bnn = bdl.bayesianize(network(), prior=bdl.priors.Normal(1.0))
    model = bdl.models.Regression(bnn, noise=dist.LogNormal(torch.tensor(0.0), 1.0), num_data=40)
    return model, bdl.guides.AutoLastLayer(model), {"elbo": bdl.evidence.LastLayerEvidence()}


PROGRAMS = {
    "evidence of the last layer": last_layer,
    "learned scales": of_program(learned_scales),
    "hierarchy": of_program(hierarchy),
    "param statements": of_program(lambda: own_statements),
    "no_grad and detach": of_program(lambda: program(network(Constant()))),
    "LayerNorm": of_program(lambda: program(network(nn.LayerNorm(5)))),
}


@pytest.mark.filterwarnings("error:train takes the steps in torch")
@pytest.mark.parametrize("name", PROGRAMS)
def test_trajectories_of_programs(name):
    pyro.clear_param_store()
    check_same_trajectory(PROGRAMS[name], data())


def test_integers_and_dicts_are_arguments():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table, self.last = nn.Embedding(7, 4), nn.Linear(5, 3)

        def forward(self, x):
            return self.last(torch.cat([self.table(x["word"]), x["number"][:, None]], -1))

    def made():
        model = bdl.models.Classification(bdl.bayesianize(Words()), num_data=40)
        return model, bdl.guides.AutoMAP(model), {}

    x = {"word": torch.arange(40) % 7, "number": torch.linspace(-1, 1, 40)}
    check_same_trajectory(made, (x, torch.arange(40) % 3), batch_size=16)


def test_large_integers_in_single_precision():
    """Their sums and products need the 64 bits that they have in torch."""

    def residues(x, y, k):
        w = pyro.sample("w", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            factor = 1 + (k % 7 + (k % 50) * 1_000_000_007 % 5).to(x.dtype)
            pyro.sample("y", dist.Normal((x @ w) * factor, 0.3), obs=y)

    torch.set_default_dtype(torch.float32)
    x, y = (value.float() for value in data())
    check_same_trajectory(of_program(lambda: residues), (x, y, torch.arange(40) * 10**9), rtol=1e-5)


def test_parameters_without_a_gradient_do_not_decay():
    def detached(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        slope = pyro.param("slope", torch.tensor(0.5)).detach()
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(slope * (x @ w), 0.3), obs=y)

    def made():
        pyro.clear_param_store()
        torch.manual_seed(0)
        guide = bdl.guides.AutoMAP(detached).prototype(*data())
        slope = pyro.param("slope").unconstrained()
        optimizer = torch.optim.AdamW([*guide.parameters(), slope], lr=0.05, weight_decay=0.5)
        return detached, guide, {"optimizer": optimizer}

    check_same_trajectory(made, data())
    assert pyro.param("slope").item() == 0.5


# Noise ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_losses_have_the_law_of_torchs(name):
    """The mean loss at (almost) fixed parameters, within five standard errors."""
    x, y = torch.randn(3, 2), torch.tensor([0.3, -0.2, 0.9])
    means, variances, first = [], [], None
    for backend in ("torch", "jax"):
        guide = FAMILIES[name](one_shift).prototype(x, y)
        first = guide.loc.detach().clone() if first is None else first
        with torch.no_grad():
            guide.loc.copy_(first)
        optimizer = torch.optim.SGD(guide.parameters(), lr=1e-300)
        losses = run(backend, one_shift, guide, x, y, steps=200, optimizer=optimizer)[0].losses
        means.append(losses.mean())
        variances.append(losses.var() / len(losses))
    assert abs(means[0] - means[1]) <= 5 * sum(variances).sqrt() + 1e-9 * means[0].abs()


class Counted(bdl.guides.GaussianNoise):
    """Factors without random numbers that depend on the number of the step."""

    def rsample(self, p, num_samples, scheduled):
        return (1.0 + 0.001 * scheduled * p).expand(num_samples, len(p))


def test_learned_rates_follow_their_schedule_over_stretches():
    def made():
        model = program()
        guide = bdl.guides.AutoMCDropout(model, sites="all", learn_p=True, noise=Counted())
        return model, guide, {}

    ours, theirs = check_same_trajectory(made, data(), steps=520, batch_size=16, rtol=1e-6)
    assert len(ours.losses) == len(theirs.losses) == 520


def conjugate():
    """A linear model with its exact posterior mean and the precision's diagonal."""
    x = torch.stack([torch.ones(30), torch.linspace(-1, 1, 30)], -1)
    y = x @ torch.tensor([0.5, -1.0]) + 0.1 * torch.cos(50 * x[:, 1])
    precision = torch.eye(2) + x.T @ x / 0.25
    return x, y, torch.linalg.solve(precision, x.T @ y / 0.25), precision.diagonal()


def linear(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def test_the_optimum_of_a_conjugate_model_is_exact():
    x, y, mean, precision = conjugate()
    guide = bdl.guides.AutoMeanField(linear)
    elbo = bdl.elbo.TemperedTraceMeanField_ELBO(num_particles=16)
    run("jax", linear, guide, x, y, steps=3000, learning_rate=0.03, elbo=elbo)
    torch.testing.assert_close(guide.loc.detach(), mean, rtol=0.02, atol=0.01)
    torch.testing.assert_close(guide.scale.detach() ** -2, precision, rtol=0.05, atol=0.0)


@pytest.mark.parametrize("known", [True, False])
def test_the_update_of_ivon_is_that_of_torch(known):
    """At a warm-up, a fall and gradients that clip, with and without the draw."""
    guide = bdl.guides.AutoMeanField(linear).prototype(*conjugate()[:2])
    ivon = bdl.optim.IVON(guide, lr=0.1, clip=1.5)
    pair = [guide.loc, guide.scale_unconstrained]
    values: list = [p.detach().clone().numpy() for p in pair]
    state = {"step": np.array(0), "momentum": np.zeros(2), "peak": np.array(0.0)}
    torch.manual_seed(0)
    for rate in (0.0, 0.05, 0.1, 0.03):
        gradients, draw = 5.0 * torch.randn(2, 2), torch.randn(2) if known else None
        for parameter, gradient in zip(pair, gradients, strict=True):
            parameter.grad = gradient.clone()
        (group,) = ivon.param_groups
        group["lr"] = rate
        ivon.step(bdl.elbo.Step(torch.tensor(0.0), temperature=0.7, draw=draw))
        with jax.enable_x64(True):
            noise = None if draw is None else draw.numpy()
            options = group, values, list(gradients.numpy()), state, rate, 0.7, noise
            values, state = ivon.jax_update(*options)
    for parameter, value in zip(pair, values, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), value, rtol=1e-10)
    own = ivon.state[guide.loc]
    assert own["step"] == int(state["step"]) and own["peak"] == float(state["peak"])


@pytest.mark.filterwarnings("error:train takes the steps in torch")
def test_ivon_reaches_the_optimum_of_a_conjugate_model():
    x, y, mean, precision = conjugate()
    guide = bdl.guides.AutoMeanField(linear).prototype(x, y)
    elbo = bdl.elbo.TemperedTraceMeanField_ELBO(num_particles=16)
    ivon = bdl.optim.IVON(guide, lr=0.1)
    run("jax", linear, guide, x, y, steps=1000, elbo=elbo, optimizer=ivon)
    torch.testing.assert_close(guide.loc.detach(), mean, rtol=0.02, atol=0.01)
    torch.testing.assert_close(guide.scale.detach() ** -2, precision, rtol=0.05, atol=0.0)
    assert ivon.state[guide.loc]["step"] == 1000
    torch.testing.assert_close(ivon.state[guide.loc]["peak"], 0.1)


def test_rows_that_meet_in_a_later_batch_are_refused_under_noise_of_each_datum():
    def gated(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(1, 1), 1.0).to_event(2))
        inputs = x + (x > 0.99) * x.mean()  # the last row reads the others of its batch
        with pyro.plate("data", 40, subsample=x):
            pyro.sample("y", dist.Normal((inputs @ w)[:, 0], 0.3), obs=y)

    elbo = bdl.elbo.TemperedTraceMeanField_ELBO(estimator="local_reparameterization")
    guide = bdl.guides.AutoMeanField(gated)
    with pytest.raises(bdl.errors.UnsupportedProgramError, match="depend on each other"):
        run("jax", gated, guide, *data(), steps=40, batch_size=10, elbo=elbo)


@pytest.mark.parametrize("estimator", ["local_reparameterization", "flipout"])
def test_noise_of_each_datum_has_the_same_expectation(estimator):
    means = []
    for name in (None, estimator):
        model = program()
        guide = bdl.guides.AutoMeanField(model).prototype(*data())
        optimizer = torch.optim.SGD(guide.parameters(), lr=1e-300)
        elbo = bdl.elbo.TemperedTraceMeanField_ELBO(estimator=name)
        losses = run(
            "jax", model, guide, *data(), steps=600, optimizer=optimizer, elbo=elbo
        )[0].losses  # fmt: skip
        means.append((losses.mean(), losses.var() / len(losses)))
    (plain, error), (rows, own) = means
    assert abs(plain - rows) <= 5 * (error + own).sqrt()
    assert own < error  # the estimators' purpose


def test_seeds_determine_the_steps():
    def losses(seed):
        model = program()
        guide = bdl.guides.AutoMCDropout(model)
        return run("jax", model, guide, *data(), seed=seed, steps=20)[0].losses

    assert torch.equal(losses(1), losses(1))
    assert not torch.equal(losses(1), losses(2))
    assert len(losses(1).unique()) == 20


def test_trainings_of_one_kind_compile_once():
    """Other data, weights, noise scales and seeds: the same compiled loop."""
    compiled = []

    def listen(event, duration, **_):
        if "backend_compile" in event:
            compiled.append(event)

    def trained(seed):
        torch.manual_seed(seed)
        x = torch.randn(40, 1)
        noise = pyro.nn.PyroParam(torch.tensor(0.3 + seed), dist.constraints.positive)
        model = program(nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)), noise)
        guide = bdl.guides.AutoMeanField(model)
        return run("jax", model, guide, x, x[:, 0].sin(), seed=seed, steps=12)[0].losses

    first = trained(0)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        others = [trained(seed) for seed in (1, 2)]
        assert not compiled
        learning = trained(3), jax.jit(lambda a: a + 3.5)(1.0)
        assert compiled and learning  # the listener works
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not any(torch.equal(first, losses) for losses in others)


def test_rounds_of_variational_em_are_traced_once(monkeypatch):
    traced = []
    monkeypatch.setattr(
        jax_steps, "loss_to_jax", lambda *a: traced.append(1) or translate.loss_to_jax(*a)
    )
    model = learned_scales()
    guide = bdl.guides.AutoMeanField(model)
    history = bdl.evidence.variational_em(
        model, guide, data(), rounds=3, steps=20, backend="jax", progress=False
    )
    noises = [next(v for name, v in h.items() if name.endswith("noise")) for h in history]
    assert len(traced) == 1 and len({float(noise) for noise in noises}) == 3


def test_the_compiled_loop_keeps_no_parameters():
    model = program()
    guide = bdl.guides.AutoMAP(model)
    run("jax", model, guide, *data(), steps=3)
    parameter, weight = weakref.ref(guide.loc), weakref.ref(model.network)
    del model, guide
    gc.collect()
    assert parameter() is None and weight() is None


# What happens between and after steps -----------------------------------------------------------


def test_a_schedule_of_temperatures_and_the_terms_of_the_last_step():
    bounds = []

    def made():
        model = program()
        bounds.append(bdl.elbo.TemperedTraceMeanField_ELBO(bdl.temperature.linear(0.1, 2.0, 50)))
        return model, bdl.guides.AutoMAP(model), {"elbo": bounds[-1]}

    check_same_trajectory(made, data())
    ours, theirs = bounds
    assert theirs.step == ours.step == 60 and theirs.temperature == ours.temperature == 2.0
    torch.testing.assert_close(ours.kl, theirs.kl)
    torch.testing.assert_close(ours.expected_log_likelihood, theirs.expected_log_likelihood)


@pytest.mark.parametrize("final", [None, 1e-5])
@pytest.mark.parametrize("kind", [bdl.guides.AutoSWAG, bdl.guides.AutoMultiSWAG])
def test_snapshots_are_those_of_torch(kind, final):
    numbers = []
    for backend in ("torch", "jax"):
        torch.manual_seed(0)
        model = program()
        guide = kind(model)
        train(model, guide, *data(), steps=20)
        torch.manual_seed(1)
        rate = {"learning_rate": 1e-4, "final_learning_rate": final} if final else {}
        record = bdl.training.collect_swag(
            model, guide, *data(), snapshots=7, every=11, batch_size=8, backend=backend, **rate
        )
        assert int(guide.snapshots.count) == 7 and len(record.losses) == 77
        numbers.append([record.losses, *guide.state_dict().values()])
    torch.testing.assert_close(*numbers, rtol=1e-8, atol=1e-10)


def test_early_stopping():
    def made():
        model = program()
        options = {"held_out": HeldOut(0.25, patience=2, check_every=20), "learning_rate": 0.3}
        return model, bdl.guides.AutoMAP(model), options

    ours, theirs = check_same_trajectory(made, data(), steps=400, rtol=1e-7)
    torch.testing.assert_close(ours.held_out, theirs.held_out)
    assert theirs.best_steps.tolist() == ours.best_steps.tolist()


def bad_rows(x, y=None):
    """A program whose loss is infinite in batches that hold the last row."""
    w = pyro.sample("w", dist.Normal(torch.zeros(1), 1.0).to_event(1))
    with pyro.plate("data", 40, subsample_size=len(x), subsample=torch.arange(len(x))):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)
    pyro.factor("edge", torch.where(x.max() >= 1.0, -math.inf, 0.0))


bad_rows.num_data = 40


@pytest.mark.filterwarnings("ignore:.*left out")
def test_steps_that_are_not_finite_are_skipped():
    def made():
        return bad_rows, bdl.guides.AutoMAP(bad_rows), {}

    options = {"batch_size": 8, "on_nonfinite": "skip", "steps": 23}
    ours, theirs = check_same_trajectory(made, data(), **options)
    assert theirs.skipped == ours.skipped != () and len(ours.losses) + len(ours.skipped) == 23


def test_a_step_that_is_not_finite_changes_nothing():
    guide = bdl.guides.AutoMAP(bad_rows)
    with pytest.raises(FailedStepError, match=r"rows .*39.*the loss is inf") as caught:
        run("jax", bad_rows, guide, *data(), steps=23, batch_size=8)
    failed = caught.value.step
    other = bdl.guides.AutoMAP(bad_rows)
    with pytest.raises(FailedStepError):
        run("torch", bad_rows, other, *data(), steps=23, batch_size=8)
    assert failed > 0
    torch.testing.assert_close(guide.loc, other.loc)


def test_an_interrupt_keeps_what_was_reached():
    def schedule(step):
        if step >= 40:
            raise KeyboardInterrupt
        return 1.0

    model = program()
    guide = bdl.guides.AutoMAP(model)
    elbo = bdl.elbo.TemperedTraceMeanField_ELBO(schedule)
    with pytest.warns(BdlWarning, match="after 40 of 100 steps"):
        held_out = HeldOut(0.25, check_every=20)
        record, _ = run("jax", model, guide, *data(), steps=100, elbo=elbo, held_out=held_out)
    assert record.interrupted and len(record.losses) == 40


def test_a_run_that_dies_goes_on_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_SECONDS", 0.0)

    def trained(path, die_at=None):
        def schedule(step):
            if step == die_at:
                raise RuntimeError("power failure")
            return 1.0

        model = program()
        guide = bdl.guides.AutoMeanField(model)
        held_out = HeldOut(0.25, check_every=10, patience=99)
        return run(
            "jax", model, guide, *data(), steps=45, held_out=held_out, batch_size=8,
            checkpoint=path, elbo=bdl.elbo.TemperedTraceMeanField_ELBO(schedule),
        )  # fmt: skip

    whole, expected = trained(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="power failure"):
        trained(tmp_path / "cut", die_at=27)
    cut, found = trained(tmp_path / "cut")
    assert torch.equal(whole.losses, cut.losses)
    assert all(map(torch.equal, expected, found))


# What has no steps in JAX is done in torch ------------------------------------------------------


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


def with_guide(guide, net=None):
    def made():
        model = program(net() if net else None)
        return model, guide(model), {}

    return made


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

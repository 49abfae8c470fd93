"""Steps in JAX are the steps of torch: without noise, the same trajectory."""

import gc
import math
import weakref

import jax
import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.trainings import (
    OPTIMIZERS,
    check_same_trajectory,
    data,
    learned_scales,
    network,
    of_program,
    program,
    run,
)
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning, FailedStepError
from pyro_bdl.tracing.jax import translate
from pyro_bdl.training import HeldOut, checkpoint, jax_steps, train

pytestmark = pytest.mark.usefixtures("double")


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


def test_the_compiled_loop_keeps_no_parameters():
    model = program()
    guide = bdl.guides.AutoMAP(model)
    run("jax", model, guide, *data(), steps=3)
    parameter, weight = weakref.ref(guide.loc), weakref.ref(model.network)
    del model, guide
    gc.collect()
    assert parameter() is None and weight() is None


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


# What happens between and after steps -----------------------------------------------------------


def test_a_schedule_of_temperatures_and_the_terms_of_the_last_step():
    bounds = []

    def made():
        model = program()
        bounds.append(bdl.elbo.TemperedTraceMeanField_ELBO(bdl.temperature.linear(0.1, 2.0, 50)))
        return model, bdl.guides.AutoMAP(model), {"elbo": bounds[-1]}

    check_same_trajectory(made, data(), steps=60)
    ours, theirs = bounds
    assert theirs.step == ours.step == 60 and theirs.temperature == ours.temperature == 2.0
    torch.testing.assert_close(ours.kl, theirs.kl)
    torch.testing.assert_close(ours.expected_log_likelihood, theirs.expected_log_likelihood)


@pytest.mark.parametrize(
    ("kind", "final"),
    [(bdl.guides.AutoSWAG, None), (bdl.guides.AutoSWAG, 1e-5), (bdl.guides.AutoMultiSWAG, None)],
)
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

"""A training run that is stopped at any moment goes on as if it had not been."""

import json
import os
import pickle

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from safetensors import safe_open
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning
from pyro_bdl.training import Checkpoint, HeldOut, Minibatches, checkpoint, train
from pyro_bdl.utils.tensor_file import load_tree, save_tree

_X = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64)[:, None]
_Y = torch.sin(3.0 * _X)
_STEPS = 12


def _program(hidden: int = 4, seed: int = 0):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(1, hidden), nn.BatchNorm1d(hidden), nn.Tanh(), nn.Linear(hidden, 1)
    )
    bnn = bdl.bayesianize(net.double(), prior=bdl.priors.Normal(1.0))
    noise = pyro.nn.PyroParam(torch.tensor(0.3, dtype=torch.float64), dist.constraints.positive)
    return bdl.models.Regression(bnn, noise=noise, num_data=24)


def _numbers(*modules):
    found = [value for module in modules for value in module.state_dict().values()]
    return [value.clone() for value in found if torch.is_tensor(value)]


# Loops of one's own: (program, guide, path, number of the step to die at) -> the guide


def _torch_loop(path, die_at, *, elbo=None, optimizer=None):
    model = _program()
    guide = bdl.guides.AutoMeanField(model).prototype(_X, _Y)
    elbo = bdl.elbo.TemperedTraceMeanField_ELBO() if elbo is None else elbo()
    objective = elbo(model, guide)
    batches = Minibatches(24, 7)
    parts = {"model": model, "guide": guide, "elbo": elbo, "batches": batches}
    if optimizer is None:
        parts["optimizer"] = torch.optim.Adam(objective.parameters(), lr=0.03)
        parts["rate"] = torch.optim.lr_scheduler.OneCycleLR(parts["optimizer"], 0.1, _STEPS)
    else:
        parts["optimizer"] = optimizer(guide)
    for step in Checkpoint(path, **parts).steps(_STEPS, every=3):
        if step == die_at:
            return None
        rows = batches.next()
        taken = objective.take_step(_X[rows], _Y[rows])
        parts["optimizer"].zero_grad()
        taken.backward()
        parts["optimizer"].step(*() if optimizer is None else (taken,))
        if "rate" in parts:
            parts["rate"].step()
    return _numbers(model, guide)


def _compiled(path, die_at):
    schedule = bdl.temperature.linear(0.1, 1.0, _STEPS)
    return _torch_loop(path, die_at, elbo=lambda: bdl.elbo.CompiledELBO(schedule))


def _ivon(path, die_at):
    return _torch_loop(path, die_at, optimizer=lambda guide: bdl.optim.IVON(guide, lr=0.1))


def _pyro_loop(path, die_at):
    """The guide and Pyro's optimizer have no parameters when the state is loaded."""
    pyro.clear_param_store()
    model = _program()
    guide = bdl.guides.AutoMeanField(model)
    optimizer = pyro.optim.ClippedAdam({"lr": 0.03, "lrd": 0.9})
    svi = SVI(model, guide, optimizer, Trace_ELBO())
    run = Checkpoint(path, model=model, guide=guide, optimizer=optimizer)
    for step in run.steps(_STEPS, every=3):
        if step == die_at:
            return None
        svi.step(_X + 0.01 * np.random.randn(), _Y)  # numpy's random numbers go on too
    guide(_X, _Y)  # which takes the loaded values if no step was left
    return _numbers(model, guide)


def _param_statements(path, die_at):
    """A program that is a function, with ``pyro.param``."""
    pyro.clear_param_store()

    def model(x, y):
        scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w * x[:, 0], scale), obs=y[:, 0])

    guide, optimizer = bdl.guides.AutoMeanField(model), pyro.optim.Adam({"lr": 0.03})
    svi = SVI(model, guide, optimizer, Trace_ELBO())
    for step in Checkpoint(path, guide=guide, optimizer=optimizer).steps(_STEPS, every=3):
        if step == die_at:
            return None
        svi.step(_X.float(), _Y.float())
    guide(_X.float(), _Y.float())
    return [*_numbers(guide), pyro.param("scale").detach()]


_LOOPS = [_compiled, _ivon, _pyro_loop, _param_statements]


@pytest.mark.parametrize("loop", _LOOPS, ids=lambda loop: loop.__name__.strip("_"))
def test_a_run_that_dies_goes_on_bit_for_bit(loop, tmp_path):
    torch.manual_seed(1)
    np.random.seed(1)
    expected = loop(tmp_path / "whole", None)
    torch.manual_seed(1)
    np.random.seed(1)
    assert loop(tmp_path / "cut", 8) is None
    torch.manual_seed(99)  # another process has other random numbers
    np.random.seed(99)
    assert loop(tmp_path / "cut", 2) is not None  # it is past its second step
    found = loop(tmp_path / "cut", None)  # a finished run takes no step
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_random_numbers_of_the_gpu_go_on(tmp_path, device):
    torch.randn(3, device=device)
    Checkpoint(tmp_path / "run").save(1)
    expected = torch.randn(3, device=device)
    Checkpoint(tmp_path / "run").load()
    assert torch.equal(torch.randn(3, device=device), expected)


def test_before_the_first_step(tmp_path):
    model = _program()
    Checkpoint(tmp_path / "run", guide=bdl.guides.AutoMeanField(model)).save(0)
    guide = bdl.guides.AutoMeanField(model)
    assert Checkpoint(tmp_path / "run", guide=guide).load() == 0
    guide.prototype(_X, _Y)
    assert guide.location().shape == (21,)


def _train(path, steps=_STEPS, **options):
    """Write a checkpoint after each step."""
    model = _program()
    guide = bdl.guides.AutoMeanField(model)
    made = train(model, guide, _X, _Y, steps=steps, batch_size=8, checkpoint=path, **options)
    return made, _numbers(model, guide)


def _dies_after(steps, monkeypatch, call):
    """Let Adam's step raise an error after so many steps."""
    left, step = iter(range(steps)), torch.optim.Adam.step

    def limited(*args, **options):
        if next(left, None) is None:
            raise RuntimeError("died")
        return step(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", limited)
        with pytest.raises(RuntimeError, match="died"):
            call()


@pytest.mark.parametrize("held_out", [None, HeldOut(0.25, patience=2, check_every=2)])
def test_train_goes_on_bit_for_bit(held_out, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_SECONDS", 0.0)
    torch.manual_seed(1)
    whole, expected = _train(tmp_path / "whole", held_out=held_out)
    torch.manual_seed(1)
    _dies_after(7, monkeypatch, lambda: _train(tmp_path / "cut", held_out=held_out))
    cut, found = _train(tmp_path / "cut", held_out=held_out)
    assert torch.equal(cut.losses, whole.losses)
    if held_out is not None:
        assert torch.equal(cut.held_out, whole.held_out)
        assert torch.equal(cut.best_steps, whole.best_steps)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_another_run_is_refused(tmp_path):
    _train(tmp_path / "run")
    with pytest.raises(ValueError, match="a run with steps=12, and this one has steps=13"):
        _train(tmp_path / "run", steps=13)
    saved = tmp_path / "other"
    model = _program()
    guide = bdl.guides.AutoMeanField(model).prototype(_X, _Y)
    Checkpoint(saved, model=model, guide=guide).save(3)
    wide = _program(5)
    theirs = bdl.guides.AutoMeanField(wide).prototype(_X, _Y)
    with pytest.raises(RuntimeError, match=r"size mismatch|another program"):
        Checkpoint(saved, model=wide, guide=theirs).load()
    with pytest.raises(ValueError, match="holds the parts model, guide, and this run has guide"):
        Checkpoint(saved, guide=theirs).load()
    with pytest.raises(TypeError, match="rate is a float without a state"):
        Checkpoint(saved, rate=0.1)


_OTHERS = {
    "data": {"y": -_Y},
    "prior": {"prior": 0.5},
    "temperature": {"elbo": bdl.elbo.TemperedTraceMeanField_ELBO(10.0)},
    "rate": {"learning_rate": 0.5},
    "estimator": {
        "elbo": bdl.elbo.TemperedTraceMeanField_ELBO(estimator="local_reparameterization")
    },
    "optimizer": {"optimizer": torch.optim.SGD},
}


@pytest.mark.parametrize("other", _OTHERS)
def test_training_of_another_posterior_is_refused(other, tmp_path):
    def trained(y=_Y, prior=1.0, optimizer=None, **options):
        # the features are no latents: they are trained, and start anew each time
        net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        bnn = bdl.bayesianize(net, prior=bdl.priors.Normal(prior), where="2.*")
        model = bdl.models.Regression(bnn, noise=0.5)
        guide = bdl.guides.AutoMeanField(model).prototype(_X, y)
        if optimizer is not None:
            options["optimizer"] = optimizer(guide.parameters(), lr=0.01)
        run = train(model, guide, _X, y, steps=3, checkpoint=tmp_path / "run", **options)
        return run.losses, _numbers(model, guide)

    losses, numbers = trained()
    again, same = trained()
    assert torch.equal(losses, again)
    assert all(torch.equal(a, b) for a, b in zip(numbers, same, strict=True))
    with pytest.raises(ValueError, match=r"is of (another run|a run with)"):
        trained(**_OTHERS[other])


def test_pyros_parameters_of_another_program_are_refused(tmp_path):
    def saved(**values):
        pyro.clear_param_store()
        for name, value in values.items():
            pyro.param(name, value, constraint=dist.constraints.interval(0.0, 9.0))
        return Checkpoint(tmp_path / "run")

    saved(a=torch.ones(2), b=torch.ones(3)).save(1)
    with pytest.raises(RuntimeError, match=r"'b' has shape \(4,\), in the checkpoint \(3,\)"):
        saved(a=torch.ones(2), b=torch.ones(4)).load()
    with pytest.raises(RuntimeError, match="'b' does not exist yet, and its constraint has arg"):
        saved(a=torch.ones(2)).load()


def test_minibatches_of_other_data_are_refused():
    with pytest.raises(RuntimeError, match="of 10 rows of data, and these are 12"):
        Minibatches(12, 5).load_state_dict(Minibatches(10, 5).state_dict())


# Files


def _saved(path):
    for step in (1, 2):
        Checkpoint(path, net=nn.Linear(2, 2).requires_grad_(False)).save(step)


@pytest.mark.parametrize("damage", ["truncated", "changed", "pickle"])
def test_a_damaged_file_is_refused_and_the_previous_one_taken(damage, tmp_path):
    path, witness = tmp_path / "run", tmp_path / "executed"
    _saved(path)
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[:-5])
    elif damage == "changed":  # one bit of a weight
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:

        class Hostile:
            def __reduce__(self):
                return os.mkdir, (str(witness),)

        path.write_bytes(pickle.dumps(Hostile()))
    run = Checkpoint(path, net=nn.Linear(2, 2))
    with pytest.warns(BdlWarning, match=r"previous' is taken"):
        assert run.load() == 1
    assert not witness.exists()
    run.previous.unlink()
    with pytest.raises(ValueError, match="no checkpoint that this version wrote, or is damaged"):
        run.load()


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run"
    _saved(path)
    content = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        Checkpoint(path, net=nn.Linear(2, 2)).save(3)
    assert path.read_bytes() == content
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run", "run.previous"]


def test_trees_come_back_as_they_were(tmp_path):
    tree = {
        "a": [1, 2.5, None, True, "text", (torch.arange(3), float("inf"))],
        7: torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "array": np.array([[1, 2], [3, 4]], dtype=np.uint32).T,
    }
    path = save_tree(tmp_path / "tree", tree, kind="tree")
    found = load_tree(path, kind="tree")
    assert found["a"][:5] == tree["a"][:5]
    assert torch.equal(found["a"][5][0], torch.arange(3))
    assert found["a"][5][1] == float("inf")
    assert found[7].dtype == torch.bfloat16
    assert found[7] == 1.5
    assert found["empty"].shape == (0, 3)
    assert np.array_equal(found["array"], tree["array"])
    with safe_open(str(path), framework="pt") as file:  # safetensors and JSON, nothing else
        assert json.loads(file.metadata()["tree"])["dict"][0][0] == "a"
    with pytest.raises(ValueError, match="it is tree, version 1"):
        load_tree(path, kind="checkpoint")
    with pytest.raises(TypeError, match=r"the state\['f'\]\[1\] is a function"):
        save_tree(path, {"f": [1, lambda: 0]}, kind="tree")

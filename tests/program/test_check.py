"""Errors name arrays and tensors of another dtype, for every entry point."""

import functools

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

import pyro_bdl as bdl
from pyro_bdl.errors import ArgumentError
from pyro_bdl.program.check import named_arguments, on_whole_data
from pyro_bdl.training import train

X, Y = torch.randn(12, 2), torch.randn(12)
ARRAYS = {
    "numpy": (X.numpy(), Y.numpy(), "numpy ndarray"),
    "pandas": (pd.DataFrame(X.numpy()), pd.Series(Y.numpy()), "pandas "),
    "lists": (X.tolist(), Y.tolist(), "list of numbers"),
}


@pytest.fixture(scope="module")
def model():
    return bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(2, 1)), num_data=12)


def svi(model, x, y):
    guide = bdl.guides.AutoMeanField(model)
    pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), pyro.infer.Trace_ELBO()).step(x, y)


def predicted(method):
    def call(model, x, y):
        guide = bdl.guides.AutoMeanField(model).prototype(X, Y)
        getattr(bdl.Predictive(model, guide, 3), method)(x, y)

    return call


def laplace(model, x, y):
    guide = bdl.guides.AutoLaplaceGGN(model, structure="diag").prototype(X, Y)
    guide.laplace_approximation((x, y))


CALLS = {
    "Predictive": predicted("__call__"),
    "log_likelihood": predicted("log_likelihood"),
    "prototype": lambda model, x, y: bdl.guides.AutoMeanField(model).prototype(x, y),
    "train": lambda model, x, y: train(model, bdl.guides.AutoMeanField(model), x, y, steps=1),
    "svi": svi,
    "laplace": laplace,
    "nuts": lambda model, x, y: bdl.mcmc.sample(model, x, y, num_warmup=1, num_samples=1),
    "sgmcmc": lambda model, x, y: bdl.mcmc.sgmcmc(
        model, (x, y), kernel=bdl.mcmc.SGLD(step_size=1e-4)
    ),
}


@pytest.mark.parametrize(
    ("call", "kind"), [*((call, "numpy") for call in CALLS), ("svi", "pandas"), ("svi", "lists")]
)
def test_arrays_are_named(model, call, kind):
    x, y, words = ARRAYS[kind]
    with pytest.raises(ArgumentError, match=words) as raised:
        CALLS[call](model, x, y)
    assert "torch.as_tensor" in str(raised.value)
    assert f"x is a {words}" in str(raised.value)


@pytest.mark.parametrize("call", CALLS)
def test_tensors_of_another_dtype_are_named(model, call):
    found = r"x has dtype torch\.float64, and the weights have torch\.float32: pass x\.to\("
    with pytest.raises(ArgumentError, match=found):
        CALLS[call](model, X.double(), Y.double())


def test_compare_names_what_is_no_tensor(model):
    guide = bdl.guides.AutoMeanField(model).prototype(X, Y)
    given = {"reference": None, "num_samples": 3}
    for kind in ARRAYS:
        x, y, _ = ARRAYS[kind]
        with pytest.raises(TypeError, match=r"x_test must be a tensor, got .*torch\.as_tensor"):
            bdl.compare(model, {"a": guide}, x, y, **given)
        with pytest.raises(TypeError, match="y_train must be a tensor"):
            bdl.compare(model, {"a": guide}, X, Y, train=(X, y), **given)
    with pytest.raises(ArgumentError, match=r"x has dtype torch\.float64"):
        bdl.compare(model, {"a": guide}, X.double(), Y, **given)


def test_a_program_that_takes_arrays_is_let_be():
    def program(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            given = None if y is None else torch.as_tensor(y)
            pyro.sample("y", dist.Normal(torch.as_tensor(x) @ w, 1.0), obs=given)

    x, y = X.numpy(), Y.numpy()
    guide = bdl.guides.AutoMeanField(program).prototype(x, y)
    assert bdl.Predictive(program, guide, 3)(x)["y"].shape == (3, 12)


def test_other_errors_are_let_be(model):
    def program(x, y=None):
        pyro.sample("w", dist.Normal(torch.zeros(()), 1.0))
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        bdl.program.Program(program, X, Y)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        bdl.guides.AutoMeanField(model).prototype(torch.randn(12, 3), Y)


def test_names_under_handlers(model):
    def program(x, *rest, **named):
        return x

    for wrapped in (
        model,
        bdl.handlers.temper(model, 0.5),
        poutine.block(poutine.scale(model, 2.0)),
        on_whole_data(bdl.handlers.cold(model, 0.5)),
        bdl.guides.AutoMeanField(model).model,
    ):
        assert list(named_arguments(wrapped, (X, Y), {})) == ["x", "y"]
    assert list(named_arguments(program, (X, Y, Y), {"z": X})) == [
        "x",
        "argument 1",
        "argument 2",
        "z",
    ]
    assert list(named_arguments(program, (), {"z": X})) == ["z"]
    assert list(named_arguments(lambda *a: a, (X,), {})) == ["argument 0"]
    assert list(named_arguments(functools.partial(program, X), (Y,), {})) == ["argument 0"]
    assert list(named_arguments(lambda x: x, (X, Y), {})) == ["argument 0", "argument 1"]
    assert np.shares_memory(named_arguments(model, (X,), {})["x"].numpy(), X.numpy())

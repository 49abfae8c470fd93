"""No call changes what belongs to the caller's process."""

import os
import random
import tempfile
import threading
import warnings
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bdl as bdl

X = torch.linspace(-1, 1, 20)[:, None]
Y = X[:, 0].sin()


def regression():
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
    return bdl.models.Regression(bdl.bayesianize(net), noise=0.3)


def laplace():
    model = regression()
    return model, bdl.guides.AutoLaplaceGGN(model).prototype(X, Y).laplace_approximation((X, Y))


def mean_field():
    model = regression()
    return model, bdl.guides.AutoMeanField(model).prototype(X, Y)


SHORT = {"num_warmup": 5, "num_samples": 5, "progress": False}
DRAWS = torch.randn(2, 50, 3, generator=torch.Generator().manual_seed(0))

# name -> a function that prepares, outside the check, and returns the call
CALLS = {
    "sample": lambda: (lambda m: lambda: bdl.mcmc.sample(m, X, Y, **SHORT))(regression()),
    "maximize": lambda: (lambda g: lambda: bdl.evidence.log_marginal_likelihood(g))(laplace()[1]),
    "compare": lambda: (
        lambda m, g: lambda: bdl.compare(m, {"a": g}, X, Y, reference=None, num_samples=20)
    )(*mean_field()),
    "ratios": lambda: (lambda m, g: lambda: bdl.importance.ratios(m, g, X, Y, num_samples=30))(
        *mean_field()
    ),
    "convergence": lambda: lambda: bdl.diagnostics.convergence(DRAWS),
    "arviz": lambda: (lambda m, g: lambda: bdl.to_arviz(m, g, X, Y, num_samples=5))(*mean_field()),
}


def loading(model, guide):
    def call():
        with tempfile.TemporaryDirectory() as folder:
            return bdl.load_posterior(guide.save(Path(folder) / "posterior"), model)

    return call


def fitted(x, y):
    model = regression()
    return model, bdl.guides.AutoMeanField(model).prototype(x, y)


# Calls that draw from the caller's generators, as torch's own do
DRAWING = {
    "Program": lambda: (lambda m: lambda: bdl.Program(m, X, Y))(regression()),
    "train": lambda: (lambda m, g: lambda: bdl.training.train(m, g, X, Y, steps=2, progress=False))(
        *mean_field()
    ),
    "predict": lambda: (lambda m, g: lambda: bdl.Predictive(m, g, 5)(X))(*mean_field()),
    "laplace": lambda: laplace,
    "freeze": lambda: (lambda m, g: lambda: bdl.freeze(m, g, X[:2], draws=3))(*mean_field()),
    "load_posterior": lambda: loading(*mean_field()),
    "k_fold": lambda: lambda: bdl.k_fold(fitted, X, Y, folds=2, num_samples=5, progress=False),
    "fit_each": lambda: lambda: bdl.training.fit_each(lambda _: mean_field(), [0], progress=False),
    "sklearn": lambda: lambda: bdl.sklearn.BayesianRegressor("map", steps=2, hidden=(2,)).fit(X, Y),
}


def state():
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filters": list(warnings.filters),
        "environment": dict(os.environ),
        "directory": os.getcwd(),
    }


def randomness():
    return [torch.get_rng_state().tolist(), repr(np.random.get_state()), repr(random.getstate())]


@pytest.mark.parametrize("name", [*CALLS, *DRAWING])
def test_a_call_leaves_the_process_as_it_was(name):
    call = (CALLS | DRAWING)[name]()
    call()  # what is imported and cached at a first use is not counted
    torch.set_num_threads(2)
    before, numbers = state(), randomness()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call()
    after = state()
    assert after == before
    if name in CALLS:
        assert randomness() == numbers


@pytest.fixture
def elsewhere():
    """A program that runs in another thread all the time."""
    inside, ends = threading.Event(), threading.Event()

    def model(x):
        inside.set()
        ends.wait(timeout=60)
        pyro.sample("w", dist.Normal(x[0, 0], 1.0))

    def run():
        bdl.Program(model, X)

    thread = threading.Thread(target=run)

    def start():
        thread.start()
        assert inside.wait(timeout=60)

    def end():
        ends.set()
        thread.join()

    yield start, end
    end()


@pytest.mark.parametrize("name", [name for name in CALLS | DRAWING if name != "convergence"])
def test_a_call_beside_another_thread_is_refused_and_works_afterwards(name, elsewhere):
    start, end = elsewhere
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = (CALLS | DRAWING)[name]()
        start()
        before = state()
        with pytest.raises((RuntimeError, ValueError), match="two threads run Pyro programs"):
            call()
        assert state() == before
        end()
        call()

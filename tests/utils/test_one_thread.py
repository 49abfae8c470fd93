"""Two threads in programs: one sentence, and nothing that stays behind. ``test_process_state.py``
holds what calls of the package do."""

import threading
from contextlib import ExitStack, contextmanager

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.poutine.runtime import _PYRO_STACK
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.curvature.hyperparameters import ReadParameters
from pyro_bdl.elbo import TemperedTrace_ELBO
from pyro_bdl.guides import AutoMAP, AutoMeanField
from pyro_bdl.program import Program, record
from pyro_bdl.program.check import WholeData
from pyro_bdl.utils.one_thread import Hidden, OneThread

X, Y = torch.linspace(-1, 1, 6)[:, None], torch.linspace(-2, 2, 6)
SENTENCE = "^two threads run Pyro programs at the same time"


def regression():
    return bdl.models.Regression(bdl.bayesianize(nn.Linear(1, 1)), noise=1.0)


class _Other:
    """A second thread that goes into something and stays there until it is let out."""

    def __init__(self, work):
        self.inside, self.left, self.error = threading.Event(), threading.Event(), None
        self.work = work
        self.thread = threading.Thread(target=self._run)

    def stay(self):
        self.inside.set()
        assert self.left.wait(120)

    def _run(self):
        try:
            self.work(self)
        except Exception as error:
            self.error = error

    def enter(self):
        self.thread.start()
        assert self.inside.wait(120)

    def leave(self):
        self.left.set()
        self.thread.join()
        return self.error


@pytest.fixture(autouse=True)
def nothing_stays():
    validation = pyro.settings.get("validate_distributions_pyro")
    yield
    assert not _PYRO_STACK
    assert pyro.settings.get("validate_distributions_pyro") == validation
    assert record(regression(), {}, (X, Y)).observed  # and programs run


def _in_the_plate(other):
    """A run that waits inside a plate that has the name of that of the ready-made models."""

    def program():
        with pyro.plate("data", 6):
            other.stay()
            pyro.sample("y", dist.Normal(torch.zeros(6), 1.0), obs=Y)

    record(program, {})


def _in_a_first_run(other):
    def program(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 6):
            other.stay()
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    Program(program, Y)


def _in_a_context(other):
    with Hidden():
        other.stay()


@pytest.mark.parametrize("stays", [_in_the_plate, _in_a_first_run, _in_a_context])
@pytest.mark.parametrize(
    "work",
    [
        lambda model, guide: record(model, {}, (X, Y)),
        lambda model, guide: AutoMAP(model).prototype(X, Y),
        lambda model, guide: TemperedTrace_ELBO()(model, guide)(X, Y),
        lambda model, guide: bdl.handlers.temper(model, 2.0)(X, Y),
    ],
    ids=["record", "prototype", "elbo", "handler"],
)
def test_a_second_thread_is_refused_and_the_first_goes_on(stays, work):
    model = regression()
    guide = AutoMeanField(model).prototype(X, Y)
    other = _Other(stays)
    other.enter()
    with pytest.raises(RuntimeError, match=SENTENCE):
        work(model, guide)
    assert other.leave() is None


@contextmanager
def _per_datum():
    with bdl.handlers.local_reparameterization():
        yield


@contextmanager
def _tempered():
    with bdl.handlers.temper(regression(), 2.0).handler:
        yield


_CONTEXTS = {
    "hidden": Hidden,
    "whole data": lambda: WholeData((), {}),
    "parameters": ReadParameters,
    "estimator": _per_datum,
    "temperature": _tempered,
}


@pytest.mark.parametrize("context", _CONTEXTS.values(), ids=_CONTEXTS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_foreign_handler_above_leaves_nothing_behind(context, fails):
    """A handler of Pyro's, which asks no one: ours is taken off in spite of it."""

    def work(other):
        with poutine.block():
            other.stay()

    other = _Other(work)
    refused = (
        pytest.raises(KeyError, match="key")
        if fails
        else pytest.raises(RuntimeError, match=SENTENCE)
    )
    with refused, context():
        other.enter()
        if fails:
            raise KeyError("key")
    other.leave()
    assert not any(isinstance(handler, OneThread) for handler in _PYRO_STACK)


def test_a_handler_that_a_foreign_error_takes_away_is_missed():
    """Pyro's handlers take all above them off the stack after an error, also in the middle of a
    run: its statements after that have reached no one."""

    def work(other):
        with poutine.block():
            other.stay()
            raise KeyError

    other, values = _Other(work), []

    def program():
        error = other.leave()
        assert isinstance(error, KeyError)
        values.append(pyro.sample("w", dist.Normal(0.0, 1.0)))

    other.enter()
    with pytest.raises(RuntimeError, match=SENTENCE):
        record(program, {"w": torch.tensor(7.0)})
    assert len(values) == 1


def test_a_thread_that_ended_inside_runs_no_program():
    stack = ExitStack()
    thread = threading.Thread(target=lambda: stack.enter_context(Hidden()))
    thread.start()
    thread.join()
    assert _PYRO_STACK
    assert record(lambda: pyro.sample("w", dist.Normal(0.0, 1.0)), {}).latents
    stack.pop_all()


def test_statements_of_another_thread_are_refused_inside_every_context():
    def statement():
        pyro.sample("other", dist.Normal(0.0, 1.0))

    for context in _CONTEXTS.values():
        other = _Other(lambda other: statement())
        with context():
            other.thread.start()
            other.thread.join()
        assert "'other' is of another thread" in str(other.error)
        assert str(other.error).startswith(SENTENCE.removeprefix("^"))


def test_threads_that_take_turns_have_the_numbers_of_one_alone():
    """With a lock around each call, as the error advises."""
    lock, results = threading.Lock(), {}

    def fit(number):
        with lock:
            torch.manual_seed(0)
            model = regression()
            guide = AutoMeanField(model)
            bdl.training.train(model, guide, X, Y, steps=20)
            results[number] = guide.location().detach()

    threads = [threading.Thread(target=fit, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fit(2)
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[2])

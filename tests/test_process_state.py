"""No call changes what belongs to its caller: the process, and the program's modules."""

import os
import random
import threading
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.calls import CALLS, OF_THE_PROGRAM, SEEDED, TRAINING, Case, X, results
from torch import nn

import pyro_bdl as bdl

pytestmark = pytest.mark.filterwarnings("ignore")  # of small data and short chains


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
        "handlers": list(pyro.poutine.runtime._PYRO_STACK),
        "modes": len(torch.overrides._get_current_function_mode_stack()),
        "hooks": len(nn.modules.module._global_forward_pre_hooks),
    }


def randomness():
    return [torch.get_rng_state().tolist(), repr(np.random.get_state()), repr(random.getstate())]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_leaves_the_process_as_it_was(name):
    case, call = Case(), CALLS[name]
    call(case)  # what is imported and cached at a first use is not counted
    torch.set_num_threads(2)
    before, numbers = state(), randomness()
    call(case)
    assert state() == before
    if name in SEEDED:
        assert randomness() == numbers


def of_modules(model):
    """Modes, numbers, hooks and gradients, which a call leaves as they were."""
    parts, tensors = list(model.modules()), [*model.parameters(), *model.buffers()]
    return {
        "modes": [part.training for part in parts],
        "hooks": [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in parts],
        "names": list(model.state_dict()),
        "numbers": [value.tolist() for value in model.state_dict().values()],
        "requires": [tensor.requires_grad for tensor in tensors],
        "gradients": [p.grad if p.grad is None else p.grad.tolist() for p in model.parameters()],
    }


READING = [name for name in OF_THE_PROGRAM if name not in TRAINING]


@pytest.mark.parametrize("name", READING)
def test_a_call_evaluates_layers_in_training_mode_and_leaves_them_so(name):
    case = Case()
    for parameter in case.module.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    before = of_modules(case.module)
    found = results(name, case)
    assert of_modules(case.module) == before
    case.module.eval()
    torch.testing.assert_close(found, results(name, case))


@pytest.mark.parametrize("name", OF_THE_PROGRAM)
def test_a_function_has_the_results_of_the_module_that_it_holds(name):
    module, hidden = Case(), Case(hidden=True)
    torch.testing.assert_close(results(name, hidden), results(name, module))
    assert of_modules(hidden.module)["modes"] == of_modules(module.module)["modes"]


@pytest.mark.parametrize("name", READING)
def test_an_error_midway_leaves_no_trace(name):
    case = Case()
    case.network.runs = 0
    results(name, case)
    needed = case.network.runs
    before, around = of_modules(case.module), state()
    for limit in {0, needed // 2, needed - 1} if needed else ():
        case.network.runs, case.network.limit = 0, limit
        with pytest.raises(Exception, match="midway"):
            results(name, case)
        assert of_modules(case.module) == before and state() == around


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


@pytest.mark.parametrize("name", [name for name in CALLS if name != "convergence"])
def test_a_call_beside_another_thread_is_refused_and_works_afterwards(name, elsewhere):
    (start, end), case, call = elsewhere, Case(), CALLS[name]
    start()
    before = state()
    with pytest.raises((RuntimeError, ValueError), match="two threads run Pyro programs"):
        call(case)
    assert state() == before
    end()
    call(case)

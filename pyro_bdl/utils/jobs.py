"""Independent fits, one after another, in several processes or on a cluster, by joblib.

Pyro has one stack of handlers and one parameter store for all threads of a process. A job that
joblib would run in another thread of the caller's process is therefore run by the caller itself.
"""

import os
import platform
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pyro
import torch

from pyro_bdl.utils.progress import progress_bar
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.validation import whole_number

_MOST = 2**16  # processes
_running = threading.Lock()  # of a worker's process: clusters run several jobs in its threads


class Job(NamedTuple):
    """A call of a function: its name in errors, the seed it starts from, its arguments."""

    name: str
    seed: int
    args: tuple


class _Caller(NamedTuple):
    """The process that asks for results, and the settings of it that numbers depend on."""

    process: tuple[str, int]
    dtype: torch.dtype
    device: torch.device
    settings: dict[str, Any]  # of Pyro
    store: Any  # of parameters, its state

    @classmethod
    def read(cls) -> "_Caller":
        return cls(
            _process(), torch.get_default_dtype(), torch.get_default_device(), pyro.settings.get(),
            pyro.get_param_store().get_state(),
        )  # fmt: skip


class _Done(NamedTuple):
    value: Any
    warned: list[tuple[str, type[Warning], str, int]]


def processes(value: Any) -> int | None:
    """The argument ``n_jobs``, a number of processes as of joblib.

    :raises TypeError: if it is no whole number.
    :raises ValueError: for 0, and for numbers that no machine has.
    """
    if value is None:
        return None
    number = whole_number(value, "n_jobs", -_MOST, _MOST)
    if not number:
        raise ValueError("n_jobs must not be 0: it is the processes at once, -1 for all cores")
    return number


def results_of(
    function: Callable[..., Any],
    jobs: Iterable[Job],
    description: str,
    *,
    n_jobs: int | None,
    progress: bool | None,
) -> Iterator[Any]:
    """The results of a function for each job, in their order and independent of where it runs.

    A job starts from its seed and a copy of the caller's parameter store, and leaves both as they
    were. Warnings of other processes are given here; an error has a note with the job's name.

    :param n_jobs: of ``processes``: -1 for all cores; None for one after another,
        or what ``joblib.parallel_config`` says.
    """
    from joblib import Parallel, delayed, parallel  # imported when needed, it takes long

    waiting, caller = list(jobs), _Caller.read()
    registry: dict[Any, Any] = {}
    # Ray and multiprocessing return all results together
    one_by_one = parallel.get_active_backend()[0].supports_return_generator
    workers = Parallel(n_jobs=n_jobs, return_as="generator" if one_by_one else "list")
    results = workers(delayed(_elsewhere)(function, job, caller) for job in waiting)
    done = progress_bar(results, description, progress, total=len(waiting))
    for job, result in zip(waiting, done, strict=True):
        if result is None:
            with _own_state(job, caller):
                value = function(*job.args)
        else:
            for text, category, file, line in result.warned:
                warnings.warn_explicit(text, category, file, line, registry=registry)
            value = result.value
        yield value


def _elsewhere(function: Callable[..., Any], job: Job, caller: _Caller) -> _Done | None:
    """The job's result; None in the caller's own process, whose other threads cannot run it."""
    from joblib import parallel_config

    if _process() == caller.process:
        return None
    with ExitStack() as stack:
        stack.enter_context(_running)
        # A cluster would give loops inside to workers that wait for this job
        stack.enter_context(parallel_config(backend="sequential"))
        stack.enter_context(pyro.settings.context(**caller.settings))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(caller.dtype)
        if caller.device != torch.get_default_device():
            stack.enter_context(caller.device)
        caught = stack.enter_context(warnings.catch_warnings(record=True, action="always"))
        stack.enter_context(_own_state(job, caller))
        value = function(*job.args)
    return _Done(value, [(str(w.message), w.category, w.filename, w.lineno) for w in caught])


@contextmanager
def _own_state(job: Job, caller: _Caller) -> Iterator[None]:
    """A job's own random state and parameter store; its errors name it."""
    store: Any = {
        "params": {
            name: value.detach().clone().requires_grad_(value.requires_grad)
            for name, value in caller.store["params"].items()
        },
        "constraints": dict(caller.store["constraints"]),
    }
    try:
        with pyro.get_param_store().scope(store), seeded(job.seed):
            yield
    except Exception as error:
        error.add_note(f"(in {job.name}, which starts from seed {job.seed})")
        raise


def _process() -> tuple[str, int]:
    return platform.node(), os.getpid()

"""Checkpoints of a training run: everything that the next step depends on, in one file."""

import copy
import os
import random
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import torch
from pyro.distributions import constraints
from pyro.optim import PyroOptim
from torch import Tensor, nn
from torch.distributions import transform_to

from pyro_bdl.errors import BdlWarning
from pyro_bdl.utils.collectives import writes_files
from pyro_bdl.utils.fingerprint import require_same
from pyro_bdl.utils.tensor_file import load_tree, save_tree
from pyro_bdl.utils.validation import whole_number

_KIND = "checkpoint"
_SECONDS = 60.0


class Checkpoint:
    """The state of a training run in a file, from which it goes on as if it had never stopped.

    ::

        run = bdl.Checkpoint("run.ckpt", model=model, guide=guide, optimizer=optimizer, elbo=elbo)
        for step in run.steps(100_000):
            svi.step(x, y)

    Started again after a crash, the same lines go on after the last step that was written, and end
    with the numbers of an uninterrupted run: on a CPU bit for bit.

    Written are the state of each part, Pyro's other parameters, and the random states of torch (CPU
    and CUDA), numpy and Python. A part is a module, such as a program or a guide, also before its
    first step; an optimizer of torch, Pyro or this library; a learning-rate schedule; an ELBO, for
    the step of its temperature schedule; a ``training.Minibatches``, for the position in the data;
    or any object with ``state_dict`` and ``load_state_dict``. A program that is a function is no
    part.

    Of several processes (:mod:`pyro_bdl.distributed`) rank 0 writes, and all of them read, also if
    there are more or fewer than before. Give the ``DataParallel_ELBO`` as a part. The random states
    of torch, numpy and Python are then those of rank 0 on all ranks.

    The file is written completely or not at all, and the one before stays as ``PATH.previous``. It
    holds tensors and JSON (safetensors): reading it runs no code.

    :param path: the file.
    :param settings: numbers, strings and, up to rounding, tensors that have to be the same when
        the run goes on.
    :param parts: objects by name.
    :raises TypeError: for an object without a state.
    """

    def __init__(
        self, path: str | Path, *, settings: Mapping[str, Any] | None = None, **parts: Any
    ) -> None:
        self.path = Path(path)
        self.settings = dict(settings or {})
        self._parts = {name: adapter(name, part) for name, part in parts.items()}
        self._modules = [part for part in parts.values() if isinstance(part, nn.Module)]

    @property
    def previous(self) -> Path:
        """The file before the last."""
        return self.path.with_name(self.path.name + ".previous")

    def steps(self, total: int, *, every: int | None = None) -> Iterator[int]:
        """Yield the numbers of the steps that are left of ``total``, from 0 in a new run.

        The state is loaded first, if there is a file, and written after the last step.

        :param every: also write after every so many steps; by default once a minute.
        """
        every = None if every is None else whole_number(every, "every")
        start = self.load()
        written = time.monotonic()
        for step in range(start, total):
            yield step
            done = step + 1
            late = time.monotonic() - written > _SECONDS if every is None else done % every == 0
            if late or done == total:
                self.save(done)
                written = time.monotonic()

    def save(self, step: int) -> None:
        """Write the state after ``step`` steps; of several ranks, the first one writes."""
        if not writes_files():
            return
        tree = {
            "step": step,
            "settings": self.settings,
            "parts": {name: part.state() for name, part in self._parts.items()},
            "store": _store_state(self._modules),
            "random": _random_state(),
        }
        new = save_tree(self.path.with_name(self.path.name + ".next"), tree, kind=_KIND)
        if self.path.exists():
            os.replace(self.path, self.previous)
        os.replace(new, self.path)

    def load(self) -> int:
        """Load the state, if there is a file, and return its number of steps; else return 0.

        The previous file is taken, with a warning, if the last one is damaged. If a part refuses
        its state, all parts stay as they were.

        :raises ValueError: if both files are damaged, or are of a run with other parts or settings.
        :raises RuntimeError: for a state of another program or optimizer.
        """
        tree = self._read()
        if tree is None:
            return 0
        self._check(tree)
        _check_store(tree["store"])
        before = {name: copy.deepcopy(part.state()) for name, part in self._parts.items()}
        try:
            for name, part in self._parts.items():
                part.load(tree["parts"][name])
            _load_store(tree["store"])
        except Exception:
            for name, part in self._parts.items():
                part.load(before[name])
            raise
        _set_random_state(tree["random"])
        return tree["step"]

    def _read(self) -> Any:
        """The newest readable file's tree; None without a file."""
        existing = [path for path in (self.path, self.previous) if path.exists()]
        for number, path in enumerate(existing):
            try:
                return load_tree(path, kind=_KIND)
            except ValueError as error:
                if number == len(existing) - 1:
                    raise
                warnings.warn(f"{error}: '{self.previous}' is taken", BdlWarning, stacklevel=4)
        return None

    def _check(self, tree: Mapping[str, Any]) -> None:
        if tree["parts"].keys() != self._parts.keys():
            raise ValueError(
                f"'{self.path}' holds the parts {', '.join(tree['parts'])}, and this run has "
                f"{', '.join(self._parts)}: give the same parts, or another path"
            )
        saved = dict(tree["settings"])
        if not writes_files():  # the tensors are of rank 0's data
            saved |= {k: v for k, v in self.settings.items() if isinstance(v, Tensor)}
        require_same(f"'{self.path}'", saved, self.settings)


class _Stateful:
    """A part with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def state(self) -> Any:
        return self.part.state_dict()

    def load(self, state: Any) -> None:
        self.part.load_state_dict(state)


class _OfPyro(_Stateful):
    """An optimizer of Pyro, which has one of torch for each parameter that it has seen."""

    def state(self) -> Any:
        waiting = self.part._state_waiting_to_be_consumed
        return {**waiting, **self.part.get_state()}

    def load(self, state: Any) -> None:
        names = pyro.get_param_store().param_name
        seen = {names(param): optimizer for param, optimizer in self.part.optim_objs.items()}
        for name in seen.keys() - state.keys():
            self.part.optim_objs = {
                param: optimizer
                for param, optimizer in self.part.optim_objs.items()
                if names(param) != name
            }
        for name in seen.keys() & state.keys():
            seen[name].load_state_dict(state[name])
        self.part.set_state({name: state[name] for name in state.keys() - seen.keys()})


class _Counter(_Stateful):
    """An ELBO, whose ``step`` is the position in its temperature's schedule."""

    def state(self) -> int:
        return self.part.step

    def load(self, state: int) -> None:
        self.part.step = state


def adapter(name: str, part: Any) -> _Stateful:
    """A part with ``state()`` and ``load(state)``.

    :param name: of the part, for messages.
    :raises TypeError: for an object without a state.
    """
    if isinstance(part, PyroOptim):
        return _OfPyro(part)
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return _Stateful(part)
    if isinstance(getattr(part, "step", None), int):
        return _Counter(part)
    raise TypeError(
        f"{name} is a {type(part).__name__} without a state (state_dict and load_state_dict): "
        "leave it out"
    )


# Pyro's parameters that belong to no module


def _named_constraints() -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(constraints).items()
        if isinstance(value, constraints.Constraint)
    }


def _store_state(modules: list[nn.Module]) -> dict[str, Any]:
    """Unconstrained values and names of constraints of ``pyro.param`` statements."""
    store = pyro.get_param_store()
    owned = {id(p) for module in modules for p in module.parameters()}
    result = {}
    for name, value in store._params.items():
        if id(value) in owned:
            continue
        constraint: Any = store._constraints[name]
        known = (key for key, each in _named_constraints().items() if each is constraint)
        result[name] = {"value": value.detach(), "constraint": next(known, None)}
    return result


def _check_store(state: Mapping[str, Any]) -> None:
    """Check that ``_load_store`` can load a state, before anything is changed.

    :raises RuntimeError: for parameters of another program, or ones that cannot be made here.
    """
    store = pyro.get_param_store()
    for name, entry in state.items():
        if name not in store and entry["constraint"] is None:
            raise RuntimeError(
                f"Pyro's parameter '{name}' does not exist yet, and its constraint has "
                "arguments: run the program once (guide(*args)) before the checkpoint is loaded"
            )
        theirs = entry["value"].shape
        ours = store._params[name].shape if name in store else theirs
        if ours != theirs:
            raise RuntimeError(
                f"Pyro's parameter '{name}' has shape {tuple(ours)}, in the checkpoint "
                f"{tuple(theirs)}: it is of another program"
            )


@torch.no_grad()
def _load_store(state: Mapping[str, Any]) -> None:
    store = pyro.get_param_store()
    for name, entry in state.items():
        value = entry["value"]
        if name not in store:
            constraint = _named_constraints()[entry["constraint"]]
            store.setdefault(name, transform_to(constraint)(value), constraint)
        store._params[name].copy_(value)


# Random states


def _random_state() -> dict[str, Any]:
    version, numbers, spare = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": np.random.get_state(),
        "python": (version, torch.tensor(numbers, device="cpu"), spare),
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])
    version, numbers, spare = state["python"]
    random.setstate((version, tuple(numbers.tolist()), spare))


class Losses:
    """The losses of the steps so far, a part for ``Checkpoint``."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.stacked()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values[:] = list(state["values"])

    def stacked(self) -> Tensor:
        """(steps,), on the device of the losses."""
        return torch.stack(self.values) if self.values else torch.empty(0, device="cpu")

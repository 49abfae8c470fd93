"""Checkpoints of a training run: everything that the next step depends on, in one file."""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.distributions import constraints
from pyro.optim import PyroOptim
from torch import Tensor, nn
from torch.distributions import transform_to

from pyro_bdl.errors import warn
from pyro_bdl.utils.collectives import writes_files
from pyro_bdl.utils.files import require_same
from pyro_bdl.utils.random_state import random_states, set_random_states
from pyro_bdl.utils.tensor_file import load_tree, save_tree
from pyro_bdl.utils.validation import as_path, whole_number

_KIND = "checkpoint"
_SECONDS = 60.0


class Checkpoint:
    """The state of a training run in a file, from which it goes on as if it had never stopped.

    ``steps`` is a loop over the steps that are left. After a crash the same script continues from
    the last step that was saved, and ends with the numbers of an uninterrupted run: on a CPU bit
    for bit.

    It saves the state of each part, Pyro's other parameters, and the random states of torch (CPU
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

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> guide, elbo = bdl.guides.AutoMeanField(model), bdl.elbo.TemperedTraceMeanField_ELBO()
        >>> optimizer = pyro.optim.Adam({"lr": 0.01})
        >>> parts = {"model": model, "guide": guide, "optimizer": optimizer, "elbo": elbo}
        >>> svi = pyro.infer.SVI(model, guide, optimizer, elbo)
        >>> run = bdl.Checkpoint("run.ckpt", **parts)
        >>> for step in run.steps(20):
        ...     loss = svi.step(x, y)
        >>> list(run.steps(22))  # the steps that are left
        [20, 21]

    :param path: the file.
    :param settings: numbers, strings and, up to rounding, tensors that have to be the same when
        the run goes on.
    :param parts: objects by name.
    :raises TypeError: for an object without a state.
    """

    def __init__(
        self, path: str | Path, *, settings: Mapping[str, Any] | None = None, **parts: Any
    ) -> None:
        self.path = as_path(path)
        self.settings = dict(settings or {})
        for name, part in parts.items():
            stateful = hasattr(part, "load_state_dict") or isinstance(part, PyroOptim)
            if not stateful and not isinstance(getattr(part, "step", None), int):
                raise TypeError(
                    f"{name} is a {type(part).__name__} without a state (state_dict and "
                    "load_state_dict): leave it out"
                )
        self._parts = parts

    @property
    def previous(self) -> Path:
        """The file before the last."""
        return self.path.with_name(self.path.name + ".previous")

    def steps(self, total: int, *, every: int | None = None, stride: int = 1) -> Iterator[int]:
        """Yield the numbers of the steps that are left of ``total``, from 0 in a new run.

        The state is loaded first, if there is a file, and written after the last step.

        :param every: also write after every so many steps; by default once a minute.
        :param stride: yield the first of each stretch of so many steps, which the caller takes
            together; ``every`` is then one of its multiples.
        """
        every = None if every is None else whole_number(every, "every")
        start = self.load()
        written = time.monotonic()
        for step in range(start, total, stride):
            yield step
            done = min(step + stride, total)
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
            "parts": {name: _state(part) for name, part in self._parts.items()},
            "store": _store_state([p for p in self._parts.values() if isinstance(p, nn.Module)]),
            "random": random_states(),
        }
        new = save_tree(self.path.with_name(self.path.name + ".next"), tree, kind=_KIND)
        if self.path.exists():
            os.replace(self.path, self.previous)
        os.replace(new, self.path)

    def load(self) -> int:
        """Load the state, if there is a file, and return its number of steps; else return 0.

        The previous file is taken, with a warning, if the last one is damaged.

        :raises ValueError: if both files are damaged, or are of a run with other parts or settings.
        :raises RuntimeError: for a state of another program or optimizer.
        """
        tree = self._read()
        if tree is None:
            return 0
        self._check(tree)
        for name, part in self._parts.items():
            _load(part, tree["parts"][name])
        _load_store(tree["store"])
        set_random_states(tree["random"])
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
                warn(f"{error}: '{self.previous}' is taken", "checkpoints")
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


def _state(part: Any) -> Any:
    """The state of a part; of an ELBO its position in the temperature's schedule."""
    if isinstance(part, PyroOptim):
        return part.get_state()
    return part.state_dict() if hasattr(part, "state_dict") else part.step


def _load(part: Any, state: Any) -> None:
    if isinstance(part, PyroOptim):
        part.optim_objs = {}  # one for each parameter, made anew from its state at the next step
        part.set_state(state)
    elif hasattr(part, "load_state_dict"):
        part.load_state_dict(state)
    else:
        part.step = state


# Pyro's parameters that belong to no module


def _named_constraints() -> dict[str, Any]:
    values = vars(constraints).items()
    return {name: value for name, value in values if isinstance(value, constraints.Constraint)}


def _store_state(modules: list[nn.Module]) -> dict[str, Any]:
    """Unconstrained values and names of constraints of ``pyro.param`` statements."""
    store: Any = pyro.get_param_store()
    of_modules = {id(p) for module in modules for p in module.parameters()}
    names = {id(constraint): name for name, constraint in _named_constraints().items()}
    used = store.get_state()["constraints"]
    values = {name: store[name].unconstrained() for name in store}
    return {
        name: {"value": value.detach(), "constraint": names.get(id(used[name]))}
        for name, value in values.items()
        if id(value) not in of_modules
    }


@torch.no_grad()
def _load_store(state: Mapping[str, Any]) -> None:
    """Load the state of ``_store_state``.

    :raises RuntimeError: for parameters of another program, or ones that cannot be made here.
    """
    store: Any = pyro.get_param_store()
    for name, entry in state.items():
        value, constraint = entry["value"], _named_constraints().get(entry["constraint"])
        if name not in store and constraint is None:
            raise RuntimeError(
                f"Pyro's parameter '{name}' does not exist yet, and its constraint has "
                "arguments: run the program once (guide(*args)) before the checkpoint is loaded"
            )
        if name not in store:
            store.setdefault(name, transform_to(constraint)(value), constraint)
        parameter = store[name].unconstrained()
        if parameter.shape != value.shape:
            raise RuntimeError(
                f"Pyro's parameter '{name}' has shape {tuple(parameter.shape)}, in the checkpoint "
                f"{tuple(value.shape)}: it is of another program"
            )
        parameter.copy_(value)

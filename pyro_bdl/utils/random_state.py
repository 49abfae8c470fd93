"""Random numbers from a seed that leave the random state of the caller and other threads
unchanged."""

import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_bdl.utils.trees import tree_leaves

# True while one of the modes below runs an operator with its generator; other modes then skip it.
_is_drawing: ContextVar[bool] = ContextVar("pyro_bdl_is_drawing", default=False)

_WITH_GENERATOR = {"default": "generator", "low": "low_generator"}


class Generators:
    """Random generators, one for each device.

    :param seed: the seed of all; None copies the state of torch's own generators at the first use.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self._made: dict[torch.device, torch.Generator] = {}

    def on(self, device: torch.device) -> torch.Generator:
        if device not in self._made:
            generator = torch.Generator(device)
            if self.seed is None:
                generator.set_state(_default_generator(device).get_state())
            else:
                generator.manual_seed(self.seed)
            self._made[device] = generator
        return self._made[device]

    def states(self) -> dict[str, Tensor]:
        """The state of each generator, by the name of its device."""
        return {str(device): made.get_state() for device, made in self._made.items()}

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Let the generators go on from what ``states`` returned."""
        for name, state in states.items():
            self.on(torch.device(name)).set_state(state)


_source: ContextVar[Generators | None] = ContextVar("pyro_bdl_generators", default=None)


@contextmanager
def seeded(seed: int) -> Iterator[Generators]:
    """Draw torch's random numbers from generators with this seed, in this thread only.

    The random state of the process is neither read nor written. Every operator takes some
    microseconds longer inside the context; ``explicit`` avoids that.
    """
    with _everything_from(Generators(seed)) as generators:
        yield generators


@contextmanager
def process_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Run with the process's own generators at ``seed``: torch's on the CPU and on a device,
    Python's and numpy's. They are put back after.

    Unlike ``seeded`` it costs nothing inside, but other threads draw from these generators too:
    for long computations, such as a whole training.
    """
    generators = {_default_generator(_indexed(kind)) for kind in (torch.device("cpu"), device)}
    states = {generator: generator.get_state() for generator in generators}
    python, numpy = random.getstate(), np.random.get_state()
    for generator in generators:
        generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        for generator, state in states.items():
            generator.set_state(state)
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def own_randomness() -> Iterator[None]:
    """Draw random numbers from a copy of the caller's random state, in this thread only.

    The caller's state is unchanged: it draws the same numbers again afterwards.
    """
    with _everything_from(Generators(None)):
        yield


@contextmanager
def _everything_from(generators: Generators) -> Iterator[Generators]:
    with explicit(generators), _Drawing(generators):
        yield generators


@contextmanager
def explicit(generators: Generators) -> Iterator[None]:
    """Let ``normal_like``, ``uniform_like`` and ``permutation`` draw from these generators.

    All other functions draw from torch's own generators, except inside ``everywhere()``.
    """
    token = _source.set(generators)
    try:
        yield
    finally:
        _source.reset(token)


def everywhere() -> AbstractContextManager:
    """A context in which all functions draw from the generators of ``explicit``, if there are
    any."""
    generators = _source.get()
    return nullcontext() if generators is None else _Drawing(generators)


def _given(device: torch.device) -> torch.Generator | None:
    generators = _source.get()
    return None if generators is None else generators.on(_indexed(device))


def normal_like(like: Tensor) -> Tensor:
    """Standard normal numbers with the shape, dtype and device of ``like``."""
    generator = _given(like.device)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def uniform_like(like: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) with the shape, dtype and device of ``like``."""
    generator = _given(like.device)
    return torch.rand(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def permutation(size: int, device: torch.device) -> Tensor:
    """The numbers 0, ..., size - 1 in random order."""
    return torch.randperm(size, generator=_given(device), device=device)


def fixed_normal(like: Tensor, seed: int = 0) -> Tensor:
    """Standard normal numbers with the shape, dtype and device of ``like``.

    They are the same in every call and on every device.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(like.shape, generator=generator, device="cpu").to(like)


class _Drawing(TorchDispatchMode):
    """Mode that passes generators to the operators that draw random numbers."""

    def __init__(self, generators: Generators) -> None:
        super().__init__()
        self.generators = generators
        self.overloads: dict[Any, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in self.overloads:
            self.overloads[func] = _drawing_overload(func)
        overload = self.overloads[func]
        if overload is None or _is_drawing.get() or _has_generator(args, kwargs):
            return func(*args, **kwargs)
        device = _device_of(args, kwargs)
        if device.type == "meta":
            return func(*args, **kwargs)
        generator = self.generators.on(device)
        if _takes_generator(overload) and get_proxy_mode() is None:  # no generator in a graph
            return overload(*args, **{**kwargs, "generator": generator})
        return _on_state_of(generator, func, args, kwargs)


def _drawing_overload(func: Any) -> Any:
    """The overload that takes a generator, for an operator that draws; None for other operators."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    if _takes_generator(func):
        return func
    name = _WITH_GENERATOR.get(func._overloadname)
    return getattr(func.overloadpacket, name, func) if name is not None else func


def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


def _has_generator(args: tuple, kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))


def _device_of(args: tuple, kwargs: dict[str, Any]) -> torch.device:
    device = kwargs.get("device")
    if device is None:
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        device = next((tensor.device for tensor in tensors), torch.get_default_device())
    return _indexed(torch.device(device))


def _indexed(device: torch.device) -> torch.device:
    if device.index is None and device.type not in ("cpu", "meta"):
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return device


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.get_device_module(device).default_generators[device.index or 0]


def _on_state_of(generator: torch.Generator, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator that cannot take a generator: torch's own generator has our state during the
    call."""
    default = _default_generator(generator.device)
    before = default.get_state()
    default.set_state(generator.get_state())
    token = _is_drawing.set(True)
    try:
        return func(*args, **kwargs)
    finally:
        _is_drawing.reset(token)
        generator.set_state(default.get_state())
        default.set_state(before)

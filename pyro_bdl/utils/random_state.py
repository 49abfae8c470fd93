"""Random numbers: the states of the process's generators, and runs that leave them as they were."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_bdl.utils.validation import whole_number

_LARGEST = 2**63 - 1


def as_seed(seed: Any) -> int:
    """A seed as an int; whole floats, tensors and numbers of numpy are accepted.

    :raises TypeError: if it is no number.
    :raises ValueError: for one that is not whole or needs more than 64 bits.
    """
    number = whole_number(seed, "seed", least=-_LARGEST - 1)
    if number > _LARGEST:
        raise ValueError(f"seed must be at most {_LARGEST}, got {seed}")
    return number


def generators() -> dict[str, torch.Generator]:
    """Torch's own generators by device: that of the CPU, and those of accelerators in use."""
    result = {"cpu": torch.default_generator}
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        made = getattr(torch.get_device_module(device), "default_generators", ())
        result |= {f"{device.type}:{number}": one for number, one in enumerate(made)}
    return result


def torch_states() -> dict[str, Tensor]:
    """The states of torch's generators by device."""
    return {name: generator.get_state() for name, generator in generators().items()}


def set_torch_states(states: Mapping[str, Tensor]) -> None:
    """Let torch's generators go on from states; those of devices that are not here are left out."""
    for name, generator in generators().items():
        if name in states:
            generator.set_state(states[name])


def random_states() -> dict[str, Any]:
    """The states of the generators of torch, numpy and Python, as a tree of tensors and numbers."""
    version, numbers, spare = random.getstate()
    python = version, torch.tensor(numbers, device="cpu"), spare
    return {"torch": torch_states(), "numpy": np.random.get_state(), "python": python}


def set_random_states(states: Mapping[str, Any]) -> None:
    """Let the generators go on from what ``random_states`` returned."""
    set_torch_states(states["torch"])
    np.random.set_state(states["numpy"])
    version, numbers, spare = states["python"]
    random.setstate((version, tuple(numbers.tolist()), spare))


@contextmanager
def own_randomness() -> Iterator[None]:
    """Put the generators of torch, numpy and Python back on exit: the caller draws the same numbers
    again afterwards."""
    torchs, numpys, python = torch_states(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        set_torch_states(torchs)
        np.random.set_state(numpys)
        random.setstate(python)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run with the generators of torch, numpy and Python at a seed; they are put back on exit.

    They are the process's own: other threads draw from them too.
    """
    seed = as_seed(seed)
    with own_randomness():
        for generator in generators().values():
            generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield


@contextmanager
def continued(states: dict[str, Tensor]) -> Iterator[None]:
    """Run with torch's generators at states, which have moved on at exit; the generators' own
    states are put back."""
    before = torch_states()
    set_torch_states(states)
    try:
        yield
    finally:
        states.update(torch_states())
        set_torch_states(before)


def fixed_normal(like: Tensor, seed: int = 0) -> Tensor:
    """Standard normal numbers with the shape, dtype and device of ``like``.

    They are the same in every call and on every device.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(like.shape, generator=generator, device="cpu").to(like)

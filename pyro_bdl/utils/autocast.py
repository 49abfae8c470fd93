"""Mixed precision: which parts of a step leave ``torch.autocast``, and what a trace needs of it."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)


class Casting(NamedTuple):
    """A device type with autocast, and the dtype that operations are cast to."""

    device_type: str
    dtype: torch.dtype


def castings() -> tuple[Casting, ...]:
    """The device types for which autocast is active, with their dtypes."""
    device = torch.accelerator.current_accelerator(check_available=True)
    kinds = ("cpu",) if device is None else ("cpu", device.type)
    return tuple(
        Casting(kind, torch.get_autocast_dtype(kind))
        for kind in kinds
        if torch.is_autocast_enabled(kind)
    )


def without_autocast() -> contextlib.AbstractContextManager:
    """A context that computes in the tensors' own dtypes."""
    active = castings()
    return _without(active) if active else contextlib.nullcontext()


@contextlib.contextmanager
def _without(active: tuple[Casting, ...]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind, dtype in active:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=False))
        yield


@contextlib.contextmanager
def without_cached_casts() -> Iterator[None]:
    """Cast parameters anew, instead of with the results of earlier casts, which a trace would take
    for tensors from outside."""
    with contextlib.ExitStack() as stack:
        for kind, dtype in castings():
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
        yield


def to_full_precision(value: Tensor) -> Tensor:
    """A result of autocast in float32, since sums lose digits in half precision."""
    return value.float() if value.dtype in _HALF and castings() else value


def rounding() -> float:
    """The relative rounding error of the operations that autocast casts; 0.0 without it."""
    return max((torch.finfo(casting.dtype).eps for casting in castings()), default=0.0)

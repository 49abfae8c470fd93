"""Float64, which some devices lack, such as Apple's GPUs; and mixed precision: which parts of a
step leave ``torch.autocast``, and what a trace needs of it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


def has_float64(device: torch.device) -> bool:
    """Return True if tensors of ``device`` may be float64, as torch declares it."""
    if device.type in ("cpu", "cuda", "meta"):
        return True
    if not hasattr(torch.accelerator, "get_device_capability"):  # torch < 2.10
        return device.type != "mps"
    return torch.float64 in torch.accelerator.get_device_capability(device)["supported_dtypes"]


def working_dtype(device: torch.device) -> torch.dtype:
    """The widest float of a device: float64, or float32 where there is none."""
    return torch.float64 if has_float64(device) else torch.float32


def rounds_to_tf32(like: Tensor) -> bool:
    """Return whether torch may round float32 factors on the device of ``like`` to TF32, which has
    the digits of half precision: in convolutions on CUDA, unless
    ``torch.backends.cudnn.allow_tf32 = False``, and in matrix products where the user allows it."""
    backends: Any = torch.backends
    products = backends.cudnn.conv, backends.cuda.matmul
    single = like.device.type == "cuda" and like.dtype == torch.float32
    return single and any(kind.fp32_precision == "tf32" for kind in products)


def double_device(device: torch.device) -> torch.device:
    """Where numbers of ``device`` are computed with in float64: there, or on the CPU."""
    return device if has_float64(device) else torch.device("cpu")


def double(x: Tensor) -> Tensor:
    """Return ``x`` in float64, on the CPU if its device has none."""
    return x.double() if has_float64(x.device) else x.cpu().double()


def keeping_double(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function of ``nn.Module._apply``, which leaves float64 tensors on the CPU where others
    are moved to a device that has none."""

    def moved(x: Tensor) -> Tensor:
        if x.dtype != torch.float64 or has_float64(function(x.new_empty(0).float()).device):
            return function(x)
        return x.cpu()

    return moved


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

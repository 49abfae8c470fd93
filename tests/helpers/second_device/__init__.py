"""The device "accel": a second device on a machine that has none, see ``second_device.cpp``."""

import copy
import functools
from pathlib import Path

import torch
from torch.utils import cpp_extension

from pyro_bdl.utils.precision import has_float64

NAME = "accel"


class _Module:
    """What ``torch.accel`` is asked for: one device, whose random numbers are the CPU's."""

    default_generators = (torch.default_generator,)
    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(torch.default_generator.manual_seed)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])

    @staticmethod
    def get_rng_state(device=None):
        return torch.default_generator.get_state()

    @staticmethod
    def set_rng_state(state, device=None):
        torch.default_generator.set_state(state)


@functools.cache
def _extension():
    source = Path(__file__).with_name("second_device.cpp")
    return cpp_extension.load("second_device", [str(source)], extra_cflags=["-O0", "-w"])


def set_float64(value: bool) -> None:
    """Whether the device has float64, as CUDA's do and Apple's does not."""
    _extension().set_float64(value)
    torch.accelerator.get_device_capability.cache_clear()


@functools.cache
def register() -> str:
    """Build the device, once for each installation of torch, and register it with torch.

    :returns: why it could not be built, such as a missing C++ compiler; empty if it was.
    """
    try:
        extension = _extension()
    except (ImportError, OSError, RuntimeError) as error:
        return str(error).splitlines()[0]
    extension.register_hooks()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return ""


def moved(value, device):
    """A tensor, or a copy of a module, on a device; in float32 if that has no float64."""
    if isinstance(value, torch.nn.Module):
        value = copy.deepcopy(value)
        return (value if has_float64(device) else value.float()).to(device)
    narrow = value.dtype == torch.float64 and not has_float64(device)
    return (value.float() if narrow else value).to(device)

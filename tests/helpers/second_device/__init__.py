"""The device "accel": a second device on a machine that has none, see ``second_device.cpp``."""

import functools
from pathlib import Path

import torch
from torch.utils import cpp_extension

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
def register() -> str:
    """Build the device, once for each installation of torch, and register it with torch.

    :returns: why it could not be built, such as a missing C++ compiler; empty if it was.
    """
    source = Path(__file__).with_name("second_device.cpp")
    try:
        extension = cpp_extension.load("second_device", [str(source)], extra_cflags=["-O0", "-w"])
    except (ImportError, OSError, RuntimeError) as error:
        return str(error).splitlines()[0]
    extension.register_hooks()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return ""

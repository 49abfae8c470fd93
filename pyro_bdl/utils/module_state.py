"""Running torch modules without leaving a trace on them: evaluation mode, untouched buffers.

Both contexts act on whatever module is called inside them, so that they also reach networks
that a Pyro program holds in a closure or a global variable.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook


def device_of(module: nn.Module) -> torch.device | None:
    """The device of a module's first tensor; None where it has none."""
    first = next(chain(module.parameters(), module.buffers()), None)
    return None if first is None else first.device


@contextmanager
def evaluation_mode() -> Iterator[None]:
    """Every module called inside runs as after ``module.eval()``; its mode is restored after."""
    modes: dict[nn.Module, bool] = {}

    def switch_off_training(module: nn.Module, args: object) -> None:
        if module in modes:
            return
        for part in module.modules():
            modes.setdefault(part, part.training)
            part.training = False

    hook = register_module_forward_pre_hook(switch_off_training)
    try:
        yield
    finally:
        hook.remove()
        for module, training in modes.items():
            module.training = training


@contextmanager
def preserved_buffers() -> Iterator[None]:
    """Buffers of modules called inside (BatchNorm's running statistics) keep their values."""
    saved: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def save(module: nn.Module, args: object) -> None:
        if module in saved:
            return
        # All parts at once, before the outermost call can put draws in the buffers' places.
        for part in module.modules():
            buffers = part.buffers(recurse=False) if part.training else ()
            saved.setdefault(part, [(buffer, buffer.detach().clone()) for buffer in buffers])

    hook = register_module_forward_pre_hook(save)
    try:
        yield
    finally:
        hook.remove()
        for pairs in saved.values():
            for buffer, value in pairs:
                buffer.data.copy_(value)


@contextmanager
def vmappable() -> Iterator[None]:
    """Attention computes with plain operators, which ``vmap`` and tracing can follow."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)

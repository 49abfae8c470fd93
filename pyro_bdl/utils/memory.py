"""Let the C library keep freed memory for the next block of work."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_LARGEST = 32 * 2**20 - 2**14  # what glibc still learns from, its own header and padding included


@functools.cache
def keep_freed_blocks() -> None:
    """Let blocks of up to 32 MB be reused instead of returned to the operating system.

    Work in chunks frees and asks for the same few blocks over and over. While glibc returns them,
    each new one is faulted in page by page, up to a third of the time. Freeing a block raises its
    threshold to that block's size (``mallopt(3)``, ``M_MMAP_THRESHOLD``), as any program that
    frees a large tensor does by the way; no page of this one is ever touched. Without effect
    elsewhere.
    """
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")


def available_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken on a device; None where that cannot be told."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return _memory_of_machine()


def _memory_of_machine() -> int | None:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


class Allocations(TorchDispatchMode):
    """Adds up the bytes of all tensors that operators make, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {_address(leaf) for leaf in tree_leaves((args, kwargs))}
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor):
                continue
            address = _address(leaf)
            if address is None:
                self.bytes += leaf.numel() * leaf.element_size()
            elif address not in inputs:
                self.bytes += leaf.untyped_storage().nbytes()
        return result


def _address(leaf: Any) -> int | None:
    """The address of a tensor's numbers; None where that cannot be told: of sparse tensors, and of
    those that torch.func works on."""
    try:
        return leaf.untyped_storage().data_ptr() if isinstance(leaf, Tensor) else None
    except (NotImplementedError, RuntimeError):
        return None

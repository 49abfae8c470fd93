"""Memory: a limit for work in pieces, reuse of freed blocks, what is available, allocations."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_bdl.utils.trees import tree_leaves

# The largest block that still raises glibc's threshold, with room for its header and padding.
_LARGEST_KEPT = 32 * 2**20 - 2**14

_limit: ContextVar[int | None] = ContextVar("pyro_bdl_working_memory", default=None)


@contextmanager
def working_memory(size: float) -> Iterator[None]:
    """Limit the memory of a piece where work is done piece by piece, inside ``with``.

    Passes over data, linearized predictions, scores and diagnostics cut large inputs into pieces.
    Smaller pieces take less memory and more time; the results are the same up to rounding, and up
    to the draws where each piece draws for itself. The limit is a goal: one row or draw is the
    smallest piece.

    :param size: the bytes of a piece's largest tensors; a piece needs a few times that in all. By
        default 8 MB to 512 MB, according to the work.
    :raises ValueError: if ``size`` is not positive.
    """
    if not size > 0:
        raise ValueError(f"working_memory takes a positive number of bytes, but size is {size}")
    token = _limit.set(int(size))
    try:
        yield
    finally:
        _limit.reset(token)


def bytes_at_once(default: int) -> int:
    """The bytes of one piece: the limit of ``working_memory``, or else the default."""
    limit = _limit.get()
    return default if limit is None else limit


@functools.cache
def keep_freed_blocks() -> None:
    """Let blocks of up to 32 MB be reused instead of returned to the operating system.

    Work in chunks frees and allocates the same few blocks again and again. If glibc returns them to
    the operating system, each new block causes page faults, which can take a third of the time.
    Freeing a block raises glibc's threshold to the size of that block (``mallopt(3)``,
    ``M_MMAP_THRESHOLD``), so this function allocates one block and frees it. Its pages are never
    touched. There is no effect with other C libraries.
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8, device="cpu")


def available_memory(device: torch.device) -> int | None:
    """The bytes that can still be allocated on a device; None if unknown."""
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
    """Sum of the bytes of all tensors that operators allocate; views do not count."""

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
    """The address of a tensor's data; None for sparse tensors and for tensors of ``torch.func``."""
    try:
        return leaf.untyped_storage().data_ptr() if isinstance(leaf, Tensor) else None
    except (NotImplementedError, RuntimeError):
        return None

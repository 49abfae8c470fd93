"""Memory: a limit for work in pieces, reuse of freed blocks, what is available, allocations."""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.utils.dispatch import TorchDispatchMode
from pyro_bdl.utils.trees import tensors_in, tree_leaves
from pyro_bdl.utils.validation import real_number

# The largest block that still raises glibc's threshold, with room for its header and padding.
_LARGEST_KEPT = 32 * 2**20 - 2**14
_SHARE_OF_GPU = 64
_NEVER_TOO_LARGE = 2**26  # bytes

_limit: ContextVar[int | None] = ContextVar("pyro_bdl_working_memory", default=None)


@contextmanager
def working_memory(size: float) -> Iterator[None]:
    """Limit the memory of a piece where work is done piece by piece, inside ``with``.

    Passes over data, linearized predictions, scores and diagnostics cut large inputs into pieces.
    Smaller pieces take less memory and more time; the results are the same up to rounding, and up
    to the draws where each piece draws for itself. The limit is a goal: one row or draw is the
    smallest piece. By default it is 8 MB to 512 MB, according to the work, and on a GPU 1/64 of its
    memory where that is more.

    :param size: the bytes of a piece's largest tensors; a piece needs a few times that in all.
    :raises ValueError: if ``size`` is not positive.
    """
    token = _limit.set(int(real_number(size, "size")))
    try:
        yield
    finally:
        _limit.reset(token)


def bytes_at_once(default: int, device: torch.device | None = None) -> int:
    """The bytes of one piece: the limit of ``working_memory``, or else the default; on a GPU at
    least 1/64 of its memory, since small pieces leave it waiting for the next operator."""
    limit = _limit.get()
    if limit is not None:
        return limit
    if device is None or device.type != "cuda":
        return default
    return max(default, torch.cuda.get_device_properties(device).total_memory // _SHARE_OF_GPU)


def stored_numbers(tensor: Tensor) -> Any:
    """How many numbers a tensor has in memory, of which ``expand`` repeats some; sizes and strides
    may be symbols."""
    if tensor.layout is not torch.strided:
        return tensor.numel()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in pairs if isinstance(stride, torch.SymInt) or stride)


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
    return memory_of_machine()


def require_memory(needed: float, device: torch.device, what: str, advice: str) -> None:
    """Check that so many bytes are free on a device, before they are allocated.

    :param what: what needs them, with its verb, such as "10 draws of 2 numbers need about".
    :param advice: what to do instead.
    :raises MemoryError: if they are not.
    """
    free = available_memory(device) if needed > _NEVER_TOO_LARGE else None
    if free is not None and needed > free:
        raise MemoryError(
            f"{what} {needed / 2**30:.1f} GiB, of which {free / 2**30:.1f} are free: {advice}"
        )


def memory_of_machine(root: Path = Path("/")) -> int | None:
    """The bytes that the process can still allocate on the host: of the machine, and below the
    limits of the container (control groups, versions 1 and 2) it runs in; None if unknown.

    :param root: the folder that holds ``proc`` and ``sys``.
    """
    machine = _numbers(root / "proc/meminfo", "MemAvailable:")
    free = [machine[0] * 1024] if machine else []
    for folder in _control_groups(root):
        for limit, used, cache in _FILES:
            most, now = _numbers(folder / limit), _numbers(folder / used)
            if most and now:  # cached files are dropped for new blocks
                free.append(most[0] - now[0] + sum(_numbers(folder / "memory.stat", cache)))
    return max(0, min(free)) if free else None


# The limit, the use, and a line of memory.stat with the part of it that is cached files.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _control_groups(root: Path) -> Iterator[Path]:
    """The folders of the process's control groups, and of the groups that these are in.

    A container may see its own group as the top one, under a path that its machine has.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        own = PurePosixPath(path.lstrip("/"))
        yield from (top / part for part in (own, *own.parents))


def _numbers(path: Path, name: str = "") -> list[int]:
    """The number in a file, or in its line that begins with a name; none if there is no such, as
    where no limit is set ("max")."""
    words = [line.removeprefix(name).split() for line in _lines(path) if line.startswith(name)]
    return [int(first) for first, *_ in words[:1] if first.isdecimal()]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


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
        for leaf in tensors_in(result):
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

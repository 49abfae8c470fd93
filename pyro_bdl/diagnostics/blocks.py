"""Statistics of the draws of many quantities, computed on a block of quantities at a time."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from pyro_bdl.utils.memory import bytes_at_once, keep_freed_blocks
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.validation import require_tensors

# Bytes of one block of draws; a statistic needs about ten times that for temporaries. A block fits
# into the cache of a CPU core, and is large enough to occupy a GPU.
_BLOCK = {"cpu": 2**21, "cuda": 2**28}
# Draws that are transposed at once; a CPU can keep track of about this many memory pages.
_ROWS = 256


def map_blocks(statistic: Callable[[Tensor], Tensor], draws: Tensor) -> Tensor:
    """Apply a statistic of chains to every quantity behind the first two axes.

    On the CPU as many blocks run in parallel as torch has threads.

    :param statistic: maps a contiguous float64 tensor ``(block, chains, draws)`` to
        ``(..., block)``.
    :param draws: ``(chains, draws, *trailing)``, any real dtype, on any device.
    :returns: float64 ``(..., *trailing)``, on the device of ``draws``; on the CPU if that has none.
    :raises TypeError: if ``draws`` is not a real tensor.
    :raises ValueError: for fewer than two axes, no chain, or fewer than 4 draws a chain.
    """
    check_draws(draws)
    chains, length, *trailing = draws.shape
    quantities = math.prod(trailing)
    flat = draws.detach().reshape(chains, length, quantities)
    numbers = bytes_at_once(_BLOCK.get(draws.device.type, _BLOCK["cpu"])) // 8
    # a row of zeros gives the shape of an empty result
    some = flat if quantities else flat.new_zeros(chains, length, 1)
    parts = some.split(max(1, numbers // (chains * length)), 2)
    if len(parts) > 1:
        keep_freed_blocks()
    with _mapping(torch.get_num_threads() if flat.is_cpu and len(parts) > 1 else 1) as mapping:
        results = list(mapping(lambda part: statistic(_quantities_first(part)), parts))
    whole = torch.cat(results, -1) if len(results) > 1 else results[0]
    return whole[..., :quantities].reshape((*whole.shape[:-1], *trailing))


def _quantities_first(part: Tensor) -> Tensor:
    """Transpose ``(chains, draws, block)`` to contiguous float64 ``(block, chains, draws)``."""
    chains, length, block = part.shape
    if not part.is_cpu:
        return double(part.permute(2, 0, 1)).contiguous()
    rows = part.reshape(chains * length, block)
    result = part.new_empty(block, chains * length, dtype=torch.float64)
    for start in range(0, chains * length, _ROWS):
        result[:, start : start + _ROWS] = rows[start : start + _ROWS].t()
    return result.view(block, chains, length)


@contextmanager
def _mapping(threads: int) -> Iterator[Callable]:
    """A context with ``map`` over several threads, in each of which torch is single-threaded.

    Numpy's sort is single-threaded. While one block sorts, torch's own threads would wait in busy
    loops on the cores that other blocks need.
    """
    if threads == 1:
        yield map
        return
    pool = ThreadPoolExecutor(threads, initializer=_single_thread)
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)


def _single_thread() -> None:
    """Let torch use one thread in operations that this thread calls; others keep their number.

    OpenMP has a number for each thread. ``torch.set_num_threads`` sets that of later threads too.
    """
    torch.get_num_threads()  # which sets it to torch's own, once in each thread
    threadpool_limits(1, user_api="openmp")


def check_draws(draws: Tensor, name: str = "draws") -> None:
    """Check that ``draws`` is a real tensor ``(chains, draws, ...)`` with at least 4 draws."""
    require_tensors(**{name: draws})
    if draws.dim() < 2:
        raise ValueError(
            f"{name} must have shape (chains, draws, ...), but has shape {tuple(draws.shape)}; "
            f"for a single chain add an axis in front: {name}[None]"
        )
    if draws.shape[0] < 1 or draws.shape[1] < 4:
        raise ValueError(
            f"at least one chain of 4 draws is needed, but {name} has shape "
            f"{tuple(draws.shape)} (chains first, then draws): draw more"
        )


def split_chains(x: Tensor) -> Tensor:
    """Split each chain into two chains, its first and last half.

    From ``(block, chains, draws)`` to ``(block, 2 * chains, draws // 2)``, both halves of a chain
    after each other; the middle draw of an odd number is left out. The result is a view if the
    number of draws is even.
    """
    half = x.shape[-1] // 2
    if x.shape[-1] % 2:
        return torch.stack([x[..., :half], x[..., -half:]], dim=2).flatten(1, 2)
    return x.reshape(len(x), 2 * x.shape[1], half)

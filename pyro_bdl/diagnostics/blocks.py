"""Streams draws of many quantities through a statistic, a block of quantities at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

# Numbers in one block of draws; a statistic holds about ten times that in temporaries.
_BLOCK_NUMBERS = {"cpu": 2**21, "cuda": 2**25}


def map_blocks(
    statistic: Callable[[Tensor], Tensor], draws: Tensor, *, block_numbers: int | None = None
) -> Tensor:
    """Apply a statistic of chains to every quantity behind the first two axes.

    :param statistic: maps a contiguous float64 tensor ``(block, chains, draws)`` to ``(block,)``.
    :param draws: ``(chains, draws, ...)``, any real dtype, on any device.
    :param block_numbers: how many numbers of ``draws`` are worked on at once; bounds the memory.
    :returns: float64 tensor of the trailing shape ``(...)``, on the device of ``draws``.
    :raises TypeError: where ``draws`` is no real tensor.
    :raises ValueError: for fewer than two axes, no chain, or fewer than 4 draws a chain.
    """
    check_draws(draws)
    chains, length, *trailing = draws.shape
    flat = draws.detach().reshape(chains, length, -1)
    quantities = flat.shape[-1]
    numbers = block_numbers or _BLOCK_NUMBERS.get(draws.device.type, _BLOCK_NUMBERS["cpu"])
    block = max(1, numbers // (chains * length))
    result = torch.empty(quantities, dtype=torch.float64, device=draws.device)
    for start in range(0, quantities, block):
        part = flat[..., start : start + block].permute(2, 0, 1)
        result[start : start + block] = statistic(part.to(torch.float64).contiguous())
    return result.reshape(trailing)


def check_draws(draws: Tensor) -> None:
    """Raise unless ``draws`` is a real tensor ``(chains, draws, ...)`` with at least 4 draws."""
    if not isinstance(draws, Tensor):
        raise TypeError(
            f"draws must be a torch tensor of shape (chains, draws, ...), "
            f"but is a {type(draws).__name__}"
        )
    if draws.is_complex():
        raise TypeError(f"draws must be real, but have dtype {draws.dtype}")
    if draws.dim() < 2:
        raise ValueError(
            f"draws must have shape (chains, draws, ...), but have shape {tuple(draws.shape)}; "
            f"for a single chain add an axis in front: draws[None]"
        )
    if draws.shape[0] < 1 or draws.shape[1] < 4:
        raise ValueError(
            f"at least one chain of 4 draws is needed, but draws have shape "
            f"{tuple(draws.shape)} (chains first, then draws): draw more"
        )


def split_chains(x: Tensor) -> Tensor:
    """First and last halves of each chain as chains of their own.

    ``(block, chains, draws)`` to ``(block, 2 * chains, draws // 2)``; the middle one of an odd
    number of draws is left out.
    """
    half = x.shape[-1] // 2
    return torch.cat([x[..., :half], x[..., -half:]], dim=-2)

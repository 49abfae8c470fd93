"""Ranks, order statistics and rank-normalised scores along the last axis.

On the CPU numpy sorts, since its sort is several times faster than torch's; tensors and arrays
share their memory. Elsewhere torch sorts on the device.
"""

import numpy as np
import torch
from torch import Tensor


def argsort(x: Tensor) -> Tensor:
    """Indices that sort ``x`` along its last axis; the order within ties is left open."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.argsort(x.numpy(), axis=-1))
    return x.argsort(-1)


def sort(x: Tensor) -> Tensor:
    """``x`` sorted along its last axis, NaN last."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(x.numpy(), axis=-1))
    return x.sort(-1).values


def average_ranks(x: Tensor) -> Tensor:
    """Ranks 1 to n along the last axis, ties sharing the mean of their ranks.

    :param x: float64 ``(..., n)`` without NaN.
    :returns: float64 ``(..., n)``, equal to ``scipy.stats.rankdata(x, axis=-1)``.
    """
    halves = torch.arange(2 * x.shape[-1] + 1, dtype=torch.float64, device=x.device)
    return _at_twice_the_rank(x, halves / 2)


def normal_scores(x: Tensor) -> Tensor:
    """Rank-normalised values, z = Phi^-1((r - 3/8) / (n + 1/4)), with r the average rank.

    :param x: float64 ``(..., n)`` without NaN.
    :returns: float64 ``(..., n)``.

    Source: Vehtari et al. (2021), Rank-normalization, folding, and localization, section 4.1;
    the offset 3/8 is Blom's (1958).
    """
    n = x.shape[-1]
    twice_rank = torch.arange(2 * n + 1, dtype=torch.float64, device=x.device).clamp_min(2)
    return _at_twice_the_rank(x, torch.special.ndtri((twice_rank / 2 - 0.375) / (n + 0.25)))


def median_of_sorted(x: Tensor) -> Tensor:
    """Median along the last axis of sorted values, the mean of the two middle ones if n is even."""
    n = x.shape[-1]
    return (x[..., (n - 1) // 2] + x[..., n // 2]) / 2


def quantile_of_sorted(x: Tensor, level: float) -> Tensor:
    """Quantile of type 7 (linear between order statistics) along the last, sorted axis.

    Written as ``scipy.stats.mstats.mquantiles`` does, to which ArviZ compares draws for equality.
    """
    n = x.shape[-1]
    place = n * level + (1 - level)
    lower = int(min(max(place, 1), n - 1))
    weight = min(max(place - lower, 0.0), 1.0)
    return (1.0 - weight) * x[..., lower - 1] + weight * x[..., lower]


def _at_twice_the_rank(x: Tensor, table: Tensor) -> Tensor:
    """Replace each number by ``table[2 r]``, r its average rank (a multiple of one half)."""
    n = x.shape[-1]
    order = argsort(x)
    ordered = x.gather(-1, order)
    is_new = ordered[..., 1:] != ordered[..., :-1]
    if bool(is_new.all()):
        values = table[2::2].expand_as(x)
    else:
        values = table[_twice_the_ranks_of_sorted(is_new, n)]
    return torch.empty_like(x).scatter_(-1, order, values)


def _twice_the_ranks_of_sorted(is_new: Tensor, n: int) -> Tensor:
    """Rank of the first plus rank of the last member of the group of ties at each place."""
    position = torch.arange(n, device=is_new.device)
    first = torch.zeros(*is_new.shape[:-1], n, dtype=torch.int64, device=is_new.device)
    first[..., 1:] = torch.where(is_new, position[1:], 0)
    last = torch.full_like(first, n - 1)
    last[..., :-1] = torch.where(is_new, position[:-1], n - 1)
    first = first.cummax(-1).values
    last = last.flip(-1).cummin(-1).values.flip(-1)
    return first + last + 2

"""Ranks, order statistics and rank-normalized scores along the last axis.

On the CPU numpy sorts, since its sort is several times faster than torch's; tensors and arrays
share their memory. On other devices torch sorts.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_bdl.utils.precision import double_device


class Ordered(NamedTuple):
    """Numbers in ascending order along the last axis, NaN last, and their original positions."""

    values: Tensor
    places: Tensor


def sort(x: Tensor) -> Tensor:
    """``x`` sorted along its last axis, NaN last."""
    if x.is_cpu:
        return torch.from_numpy(np.sort(x.numpy(), axis=-1))
    return x.sort(-1).values


def ordered(x: Tensor) -> Ordered:
    """``x`` sorted along its last axis; the order of equal numbers is not defined."""
    if x.is_cpu:
        places = torch.from_numpy(np.argsort(x.numpy(), axis=-1))
        return Ordered(x.gather(-1, places), places)
    return Ordered(*x.sort(-1))


def largest(x: Tensor, count: int) -> Ordered:
    """The ``count`` largest numbers along the last axis, ascending, NaN last."""
    if x.is_cpu:
        first = x.shape[-1] - count
        places = torch.from_numpy(np.argpartition(x.numpy(), first, axis=-1)[..., first:])
    else:
        places = x.topk(count, sorted=False).indices
    values, order = ordered(x.gather(-1, places))
    return Ordered(values, places.gather(-1, order))


def folded(x: Ordered) -> Ordered:
    """The distances from the median, ``abs(x - median(x))``, in ascending order."""
    distances = (x.values - median_of_sorted(x.values)[..., None]).abs()
    if x.values.is_cpu:
        # The distances fall, then rise; numpy's stable sort only has to merge these two runs.
        order = torch.from_numpy(np.argsort(distances.numpy(), axis=-1, kind="stable"))
        return Ordered(distances.gather(-1, order), x.places.gather(-1, order))
    values, order = distances.sort(-1)
    return Ordered(values, x.places.gather(-1, order))


def average_ranks(x: Ordered) -> Tensor:
    """Ranks 1 to n of each row; equal numbers get the mean of their ranks.

    :param x: ``(rows, n)``, without NaN.
    :returns: float64 ``(rows, n)`` in the order before sorting, as ``scipy.stats.rankdata``.
    """
    device = double_device(x.values.device)
    halves = torch.arange(2 * x.values.shape[-1] + 1, dtype=torch.float64, device=device)
    return _at_twice_the_rank(x, halves / 2)


def normal_scores(x: Ordered) -> Tensor:
    """Rank-normalized values, z = Phi^-1((r - 3/8) / (n + 1/4)), with r the average rank.

    Ranks are multiples of one half, so z is looked up in a table of 2 n numbers.

    :param x: ``(rows, n)``, without NaN.
    :returns: float64 ``(rows, n)`` in the order before sorting.

    Source: Vehtari et al. (2021), Rank-normalization, folding, and localization, section 4.1;
    the offset 3/8 is Blom's (1958).
    """
    n = x.values.shape[-1]
    device = double_device(x.values.device)
    twice_rank = torch.arange(2 * n + 1, dtype=torch.float64, device=device).clamp_min(2)
    return _at_twice_the_rank(x, torch.special.ndtri((twice_rank / 2 - 0.375) / (n + 0.25)))


def median_of_sorted(x: Tensor) -> Tensor:
    """Median along the last axis of sorted values; for even n the mean of the two middle values."""
    n = x.shape[-1]
    return (x[..., (n - 1) // 2] + x[..., n // 2]) / 2


def quantile_of_sorted(x: Tensor, level: float) -> Tensor:
    """Quantile of type 7 (linear between order statistics) along the last, sorted axis.

    It is rounded like ``numpy.quantile``, which ArviZ 1.x uses.
    """
    n = x.shape[-1]
    place = (n - 1) * level
    lower = min(int(place), n - 1)
    weight = place - lower
    below, above = x[..., lower], x[..., min(lower + 1, n - 1)]
    step = above - below
    return below + step * weight if weight < 0.5 else above - step * (1 - weight)


def _at_twice_the_rank(x: Ordered, table: Tensor) -> Tensor:
    """``table[2 r]`` at each position of the unsorted rows, with r the average rank there."""
    values, places = x
    result = torch.empty_like(values).scatter_(-1, places, table[2::2].expand_as(values))
    # Ties are corrected one by one, since there are usually few (and one in every folded row).
    rows, columns = (values[:, 1:] == values[:, :-1]).nonzero(as_tuple=True)
    if len(rows):
        row, column, twice_rank = _tied(rows, columns)
        result[row, places[row, column]] = table[twice_rank]
    return result


def _tied(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row and column of each number that is equal to another one, and twice its average rank.

    :param rows: rows of the sorted numbers that are equal to the next number, in lexicographic
        order.
    :param columns: columns of these numbers.
    """
    begins = torch.ones_like(rows, dtype=torch.bool)
    begins[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1] + 1)
    group = begins.cumsum(0) - 1
    first_row, first = rows[begins], columns[begins]
    last = first + group.bincount()
    twice_rank = first + last + 2
    return (
        torch.cat([rows, first_row]),
        torch.cat([columns, last]),
        torch.cat([twice_rank[group], twice_rank]),
    )

"""Checks of what the user hands over; each failure is told in one sentence."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.program.wrappers import unwrapped
from pyro_bdl.utils.validation import check_finite_tensor


def check_finite(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Additive attention masks, of zeros and -inf alone, count as finite.

    :raises ValueError: naming argument, rows and columns, where a tensor is not finite.
    """
    for name, value in _named_arguments(model, args, kwargs).items():
        if isinstance(value, Tensor) and value.is_floating_point() and not _is_mask(value):
            check_finite_tensor(name, value)


def check_finite_batches(
    model: Callable, batches: Iterable[tuple[tuple, Mapping[str, Any]]]
) -> None:
    """:raises ValueError: as ``check_finite``, naming the batch too."""
    for number, (args, kwargs) in enumerate(batches):
        try:
            check_finite(model, args, kwargs)
        except ValueError as error:
            raise ValueError(f"batch {number} (counted from 0, as rows are): {error}") from None


def _is_mask(value: Tensor) -> bool:
    """Whether there are zeros and -inf and nothing else."""
    kept = value == 0
    return bool((kept | (value == -torch.inf)).all()) and bool(kept.any())


def _of_shape(distribution: Any, value: Tensor) -> Tensor:
    """A value that broadcasts against a distribution, with the dimensions of its events."""
    missing = distribution.event_dim - value.dim()
    return value.expand(distribution.event_shape) if missing > 0 else value


def _named_arguments(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    function = unwrapped(model)
    if isinstance(function, torch.nn.Module):
        function = function.forward
    try:
        return dict(inspect.signature(function).bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)

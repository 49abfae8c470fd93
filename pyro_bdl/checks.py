"""Checks of what the user hands over; each failure is told in one sentence."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor

from pyro_bdl.program import Run, _bounds


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


def check_finite_tensor(name: str, value: Tensor) -> None:
    """:raises ValueError: naming rows and columns, where ``value`` holds NaN or infinity."""
    bad = ~torch.isfinite(value)
    if not bad.any():
        return
    where = bad.nonzero()
    rows = _listed(where[:, 0].unique().tolist()) if value.dim() else ""
    text = f" in rows {rows}" if rows else ""
    if value.dim() > 1:
        text += f", columns {_listed(where[:, 1].unique().tolist())}"
    raise ValueError(
        f"{name} holds NaN or infinity{text}: remove or impute these values "
        "(where a mask leaves them out, any number does)"
    )


def check_support(run: Run) -> None:
    """Supports with tensors for bounds are left out: these may move with the latents.

    :raises ValueError: naming site and rows, where a target is none that its distribution gives,
        such as a class that does not exist.
    """
    for name, site in run.observed.items():
        if site.value is None:
            continue
        distribution, masks = site.distribution, [site.mask]
        while isinstance(distribution, MaskedDistribution):
            masks.append(distribution._mask)
            distribution = distribution.base_dist
        support: Any = distribution.support
        if _bounds(support):
            continue
        bad = ~support.check(site.value)
        for mask in masks:
            bad = bad if mask is None else bad & mask
        if not bad.any():
            continue
        where = f" in rows {_listed(bad.nonzero()[:, 0].unique().tolist())}" if bad.dim() else ""
        raise ValueError(
            f"the targets of site '{name}' hold values outside the support of their distribution "
            f"({support}){where}: correct these targets"
        )


def _listed(numbers: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown + (f", ... ({len(numbers)} in all)" if len(numbers) > most else "")


def _named_arguments(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    from pyro_bdl.handlers import Handled, UnderPrior  # which need the guides, and these this file

    function = model
    while isinstance(function, Handled | UnderPrior):
        function = function.model
    if isinstance(function, torch.nn.Module):
        function = function.forward
    try:
        return dict(inspect.signature(function).bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)

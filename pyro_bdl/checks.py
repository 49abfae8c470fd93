"""Checks of what the user hands over; each failure is told in one sentence."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.handlers import Handled


def check_finite(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """:raises ValueError: naming argument, rows and columns, where a tensor is not finite."""
    for name, value in _named_arguments(model, args, kwargs).items():
        if isinstance(value, Tensor) and value.is_floating_point():
            check_finite_tensor(name, value)


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
    raise ValueError(f"{name} holds NaN or infinity{text}: remove or impute these values")


def _listed(numbers: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown + (f", ... ({len(numbers)} in all)" if len(numbers) > most else "")


def _named_arguments(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    function = model
    while isinstance(function, Handled):
        function = function.model
    if isinstance(function, torch.nn.Module):
        function = function.forward
    try:
        return dict(inspect.signature(function).bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)

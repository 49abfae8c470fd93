"""Checks of single arguments; each failure is told in one sentence."""

import math

import torch
from torch import Tensor


def check_temperature(temperature: float, argument: str = "temperature") -> float:
    """:raises ValueError: unless the temperature is a positive finite number."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"{argument} must be a positive finite number, got {temperature}; use 1.0 for Bayes"
        )
    return temperature


def check_finite_tensor(name: str, value: Tensor) -> None:
    """:raises ValueError: naming rows and columns, where ``value`` holds NaN or infinity."""
    bad = ~torch.isfinite(value)
    if not bad.any():
        return
    where = bad.nonzero()
    rows = listed(where[:, 0].unique().tolist()) if value.dim() else ""
    text = f" in rows {rows}" if rows else ""
    if value.dim() > 1:
        text += f", columns {listed(where[:, 1].unique().tolist())}"
    raise ValueError(
        f"{name} holds NaN or infinity{text}: remove or impute these values "
        "(where a mask leaves them out, any number does)"
    )


def listed(numbers: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown + (f", ... ({len(numbers)} in all)" if len(numbers) > most else "")

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


def check_finite_tensor(name: str, value: Tensor, *, masks: bool = False) -> None:
    """
    :param masks: whether an additive attention mask counts as finite.
    :raises ValueError: naming rows and columns, where ``value`` holds NaN or infinity.
    """
    if value.layout is not torch.strided:
        entries = value.coalesce() if value.layout is torch.sparse_coo else value
        if entries.values().isfinite().all():
            return
        value = value.to_dense()
    if masks and _is_mask(value):
        return
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


def _is_mask(value: Tensor) -> bool:
    """Whether there are zeros and -inf and nothing else."""
    kept = value == 0
    return bool((kept | (value == -torch.inf)).all()) and bool(kept.any())

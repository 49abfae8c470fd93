"""Checks of single arguments, with one-sentence errors."""

import math
import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor


def check_temperature(temperature: float, argument: str = "temperature") -> float:
    """Check and return a temperature.

    :raises TypeError: if it is no number.
    :raises ValueError: unless it is a positive finite number.
    """
    if not isinstance(temperature, Real | Tensor):
        raise TypeError(f"{argument} must be a number, got {temperature!r}")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"{argument} must be a positive finite number, got {temperature}; use 1.0 for Bayes"
        )
    return temperature


def check_finite_tensor(
    name: str, value: Tensor, *, masks: bool = False, missing: bool = False
) -> None:
    """Check that a tensor is finite.

    :param name: a name for the tensor, for errors.
    :param masks: whether an additive attention mask (zeros and -inf) counts as finite.
    :param missing: whether NaN does.
    :raises ValueError: if ``value`` holds NaN or infinity, with their rows and columns.
    """
    if value.layout is not torch.strided:
        entries = value.coalesce() if value.layout is torch.sparse_coo else value
        if entries.values().isfinite().all():
            return
        value = value.to_dense()
    if masks and _is_mask(value):
        return
    bad = value.isinf() if missing else ~value.isfinite()
    if not bad.any():
        return
    where = bad.nonzero()
    rows = listed(where[:, 0].unique().tolist()) if value.dim() else ""
    text = f" in rows {rows}" if rows else ""
    if value.dim() > 1:
        text += f", columns {listed(where[:, 1].unique().tolist())}"
    raise ValueError(
        f"{name} holds NaN or infinity{text}: remove or impute these values (where a mask leaves "
        "them out, any number does; a ready-made program leaves targets that are NaN out by "
        "missing_targets=True)"
    )


def ranked(scores: Tensor) -> Tensor:
    """Scores whose largest is the best: -inf where they are not finite, which is never the best."""
    return scores.masked_fill(~scores.isfinite(), -torch.inf)


def listed(numbers: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown + (f", ... ({len(numbers)} in all)" if len(numbers) > most else "")


def _is_mask(value: Tensor) -> bool:
    """Return whether a tensor holds zeros and -inf and nothing else."""
    kept = value == 0
    return bool((kept | (value == -torch.inf)).all()) and bool(kept.any())


def whole_number(value: Any, name: str, least: int = 1) -> int:
    """Return a whole number as an int; floats such as 1e5 and tensors are accepted.

    :param name: the argument's name, for errors.
    :param least: the smallest number that is allowed.
    :raises TypeError: if the value is not a number.
    :raises ValueError: for a number that is not whole, NaN, or too small.
    """
    number = value
    if isinstance(value, float) and value.is_integer():
        number = int(value)
    if isinstance(number, float):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    try:
        if isinstance(number, bool):
            raise TypeError
        number = operator.index(number)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return number


def positive(value: Any, name: str) -> float:
    """Return a positive finite number, which may be a tensor, as a float.

    :param name: the argument's name, for errors.
    :raises TypeError: if the value is not a number.
    :raises ValueError: for a number that is not positive, or not finite.
    """
    try:
        value = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value:g}")
    return value


def check_choice(value: Any, name: str, known: Iterable[Any]) -> None:
    """Check that a value is one of those that an argument may have.

    :param name: the argument's name, for errors.
    :raises ValueError: for another one.
    """
    known = list(known)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")

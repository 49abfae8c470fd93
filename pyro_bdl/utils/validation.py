"""Checks of single arguments, with one-sentence errors."""

import operator
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_LARGEST = 2**63 - 1  # of torch's whole numbers
_SHORT = 60  # characters of a value that an error shows as it is
_INTERVALS = {
    "(0, inf)": "be positive and finite",
    "[0, 1]": "lie between 0 and 1",
    "(0, 1)": "lie between 0 and 1, both excluded",
}


def real_number(value: Any, name: str, interval: str = "(0, inf)") -> float:
    """Return a number, which may be a tensor, as a float.

    :param name: the argument's name, for errors.
    :param interval: where it must lie, such as "[0, 1)".
    :raises TypeError: if the value is not one real number.
    :raises ValueError: for NaN and numbers outside the interval.
    """
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        result = float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a number, got {_shown(value)}") from None
    low, high = map(float, interval[1:-1].split(","))
    ends = (low, "[") if result == low else (high, "]")
    if not (low < result < high or (result == ends[0] and ends[1] in interval)):
        place = _INTERVALS.get(interval, f"lie in {interval}")
        raise ValueError(f"{name} must {place}, got {value}")
    return result


def _shown(value: Any) -> str:
    """A value in words: itself where it is short, else what it is."""
    text = repr(value)
    return text if len(text) <= _SHORT and "\n" not in text else f"a {type(value).__name__}"


def one_of(value: Any, name: str, words: Iterable[str | None]) -> Any:
    """Return a word that is one of several.

    :raises ValueError: for anything else.
    """
    known = tuple(words)
    if not (value is None or isinstance(value, str)) or value not in known:
        words = ", ".join(map(repr, known))
        raise ValueError(f"{name} must be one of {words}, got {_shown(value)}")
    return value


def require(value: Any, kinds: Any, text: str, advice: str = "") -> None:
    """Check the class of an argument.

    :param kinds: a class, or several, as of ``isinstance``.
    :param text: what the error begins with, such as "noise must be a Distribution".
    :param advice: what it ends with, such as ": pass ...".
    :raises TypeError: with that text and what the argument is.
    """
    if not isinstance(value, kinds):
        kind = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{text}, got {kind}{advice}")


def as_path(value: Any, name: str = "path") -> Path:
    """A file or folder that is named by a string or by an object such as a ``Path``.

    :raises TypeError: for anything else.
    """
    require(value, (str, os.PathLike), f"{name} must be a string or a Path")
    return Path(value)


def require_tensors(**values: Any) -> None:
    """Check that arguments are tensors of real numbers.

    :raises TypeError: naming the argument.
    """
    for name, value in values.items():
        require(value, Tensor, f"{name} must be a tensor", ": pass torch.as_tensor(...) of it")
        if value.is_complex():
            raise TypeError(f"{name} must hold real numbers, but has dtype {value.dtype}")


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


def whole_number(value: Any, name: str, least: int = 1, most: int | None = None) -> int:
    """Return a whole number as an int; floats such as 1e5 and tensors are accepted.

    :param name: the argument's name, for errors.
    :param least: the smallest number that is allowed.
    :param most: the largest one; None for any of 64 bits.
    :raises TypeError: if the value is not a number.
    :raises ValueError: for a number that is not whole, NaN, too small or too large.
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
        raise TypeError(f"{name} must be a whole number, got {_shown(value)}") from None
    largest = _LARGEST if most is None else most
    if not least <= number <= largest:
        below = most is None and number < least
        place = f"at least {least}" if below else f"from {least} to {largest}"
        raise ValueError(f"{name} must be {place}, got {value}")
    return number

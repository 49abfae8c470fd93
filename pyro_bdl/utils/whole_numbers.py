"""Whole numbers that a user gives."""

import operator
from typing import Any


def whole_number(value: Any, name: str) -> int:
    """Return a number of at least 1 as an int; floats such as 1e5 and tensors count where whole.

    :param name: of the argument.
    :raises TypeError: for what is no number.
    :raises ValueError: for a number that is not whole, NaN, or smaller than 1.
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
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return number

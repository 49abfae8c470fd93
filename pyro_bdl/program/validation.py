"""Checks of a program's arguments, with one-sentence errors."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from pyro_bdl.program.argument_errors import named_arguments
from pyro_bdl.utils.validation import check_finite_tensor


def check_finite(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Check that arguments are finite; additive attention masks of zeros and -inf are accepted.

    :raises ValueError: if a tensor is not finite; the error names argument, rows and columns.
    """
    for name, value in named_arguments(model, args, kwargs).items():
        if isinstance(value, Tensor) and value.is_floating_point():
            check_finite_tensor(name, value, masks=True)


def check_finite_batches(
    model: Callable, batches: Iterable[tuple[tuple, Mapping[str, Any]]]
) -> None:
    """Check that the arguments of all batches are finite.

    :raises ValueError: as ``check_finite``; the error names the batch too.
    """
    for number, (args, kwargs) in enumerate(batches):
        try:
            check_finite(model, args, kwargs)
        except ValueError as error:
            raise ValueError(f"batch {number} (counted from 0, as rows are): {error}") from None

"""Checks of the data of a comparison."""

from typing import Any

import torch
from torch import Tensor

from pyro_bdl.program.batches import as_dicts, has_rows, leading_size, taken
from pyro_bdl.program.check import by_entry
from pyro_bdl.utils.trees import tree_leaves
from pyro_bdl.utils.validation import check_finite_tensor


def checked(kind: str, parts: Any, *, count: int | None = None) -> tuple:
    """Data as a program's arguments: finite tensors with rows, or dicts of them.

    :param kind: ``"test"``, ``"train"`` or ``"ood"``, for messages.
    :param count: how many arguments there must be.
    :raises TypeError: for what is no tensor.
    :raises ValueError: for no arguments or other ones than ``count``, no rows, NaN and infinity.
    """
    if not isinstance(parts, tuple | list):
        raise TypeError(f"{kind} must be a tuple of tensors, got {type(parts).__name__}")
    if not parts or count not in (None, len(parts)):
        wanted = "inputs and, last, targets" if kind != "ood" else "inputs without targets"
        raise ValueError(
            f"{kind} must hold {wanted}, as the test data do, got {len(parts)} tensors"
        )
    for place, part in enumerate(parts):
        name = kind if kind == "ood" else f"{'y' if place == len(parts) - 1 else 'x'}_{kind}"
        for entry, tensor in by_entry({name: part}).items():
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{entry} must be a tensor, got {type(tensor).__name__}: pass "
                    "torch.as_tensor(...)"
                )
            if tensor.dim() == 0 or not len(tensor):
                raise ValueError(f"{entry} must have at least one row")
            check_finite_tensor(entry, tensor)
    return tuple(map(as_dicts, parts))


def check_rows(kind: str, args: tuple) -> None:
    """Check that all tensors of the data have the same number of rows.

    :raises ValueError: if not.
    """
    if not has_rows((args, {}), leading_size(args)):
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(f"the {kind} data must have the same number of rows, got {shapes}")


def thinned(args: tuple, most: int) -> tuple:
    """At most so many rows, evenly spaced."""
    check_rows("ood", args)
    rows = leading_size(args)
    count = min(rows, most)
    device = next(leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
    return taken(args, (torch.arange(count, device=device) * rows) // count)

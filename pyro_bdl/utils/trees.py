"""Nested tuples, lists and dicts as lists of leaves: torch's functions for them, imported in one
place, since torch has no public name for them."""

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import (  # noqa: F401
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

_ROUNDING = 1e-5  # of single precision, beside the largest number


def equal_trees(one: Any, other: Any) -> bool:
    """Return whether two trees hold the same numbers, up to the rounding of single precision."""
    (ours, shape), (theirs, other_shape) = tree_flatten(one), tree_flatten(other)
    return shape == other_shape and all(_are_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _are_equal(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other) and bool(one == other)
    if one.shape != other.shape:
        return False
    a, b = (value.detach().to("cpu", torch.float64) for value in (one, other))
    size = float(b.nan_to_num().abs().max()) if b.numel() else 0.0
    return bool(torch.isclose(a, b, rtol=0.0, atol=_ROUNDING * size, equal_nan=True).all())


def constants_of(leaves: Iterable[Any]) -> tuple[tuple[type, Any] | None, ...]:
    """Of each leaf its type, since 1, 1.0 and True are equal, and its value or, where it cannot be
    in a key, its identity; None for a tensor."""
    return tuple(
        None
        if isinstance(leaf, Tensor)
        else (type(leaf), leaf if isinstance(leaf, Hashable) else id(leaf))
        for leaf in leaves
    )

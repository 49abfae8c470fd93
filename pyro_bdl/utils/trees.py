"""Nested tuples, lists and dicts as lists of leaves: torch's functions for them, imported in one
place, since torch has no public name for them."""

from collections.abc import Hashable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._pytree import (  # noqa: F401
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)


def constants_of(leaves: Iterable[Any]) -> tuple[tuple[type, Any] | None, ...]:
    """Of each leaf its type, since 1, 1.0 and True are equal, and its value or, where it cannot be
    in a key, its identity; None for a tensor."""
    return tuple(
        None
        if isinstance(leaf, Tensor)
        else (type(leaf), leaf if isinstance(leaf, Hashable) else id(leaf))
        for leaf in leaves
    )

"""Nested tuples, lists and dicts as lists of leaves: torch's functions for them, imported in one
place, since torch has no public name for them."""

from torch.utils._pytree import (  # noqa: F401
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

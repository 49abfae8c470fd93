"""Nested tuples, lists and dicts as lists of leaves: torch's functions for them, imported in one
place, since torch has no public name for them."""

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import (  # noqa: F401
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

_ROUNDING = 1e-5  # of single precision, beside the largest number


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def is_record(value: Any) -> bool:
    """Return whether an object has entries by name, as a mapping and the graphs of torch_geometric
    do: ``keys()`` and ``value[key]``. Tables of pandas do not count."""
    has_entries = callable(getattr(value, "keys", None)) and hasattr(value, "__getitem__")
    return has_entries and not hasattr(value, "__array__")


def entries_of(name: str, value: Any) -> dict[str, Any]:
    """The parts of a value by their names, as ``x['ids']`` or ``x[0]``: of records, and of whatever
    is registered as a pytree and holds tensors."""
    if is_record(value):
        parts = {f"{name}[{key!r}]": value[key] for key in value.keys()}  # noqa: SIM118
    elif isinstance(value, Tensor):
        return {name: value}
    else:
        leaves = tree_flatten_with_path(value)[0]
        if not any(isinstance(leaf, Tensor) or is_record(leaf) for _, leaf in leaves):
            return {name: value}  # such as a list of numbers
        parts = {f"{name}{keystr(path)}": leaf for path, leaf in leaves}
    return {key: leaf for own, part in parts.items() for key, leaf in entries_of(own, part).items()}


def equal_trees(one: Any, other: Any) -> bool:
    """Return whether two trees hold the same numbers, up to the rounding of single precision."""
    (ours, shape), (theirs, other_shape) = tree_flatten(one), tree_flatten(other)
    return shape == other_shape and all(_are_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return equal_numbers(one, other)
    return type(one) is type(other) and bool(one == other)


def equal_numbers(one: Any, other: Any, rounding: float = _ROUNDING) -> bool:
    """Return whether two tensors or arrays hold the same numbers up to rounding, relative to the
    largest finite one of ``other``; infinities and NaN are equal to such."""
    a, b = (torch.as_tensor(v, device="cpu").detach().double() for v in (one, other))
    size = b.where(b.isfinite(), 0.0).abs().max() if b.numel() else 0.0
    close = a.shape == b.shape and torch.isclose(
        a, b, rtol=0.0, atol=rounding * float(size), equal_nan=True
    )
    return bool(torch.as_tensor(close, device="cpu").all())


def constants_of(leaves: Iterable[Any]) -> tuple[tuple[type, Any] | None, ...]:
    """Of each leaf its type, since 1, 1.0 and True are equal, and its value or, where it cannot be
    in a key, its identity; None for a tensor."""
    return tuple(
        None
        if isinstance(leaf, Tensor)
        else (type(leaf), leaf if isinstance(leaf, Hashable) else id(leaf))
        for leaf in leaves
    )

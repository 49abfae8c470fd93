"""Compiled functions that several runs share, since they differ in their arguments alone."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=True, unsafe_hash=True)
class _Recipe:
    key: tuple
    make: Callable[[], Any] | None = field(compare=False)


def shared(key: tuple, make: Callable[[], Any]) -> Any:
    """Return the value of ``make`` at the first call with this key, by which it is determined.

    It is a function of ``jax.jit``, which folds of data, seeds and simulated data compile once.
    """
    return _made(_Recipe(key, make))


@functools.lru_cache(maxsize=64)
def _made(recipe: _Recipe) -> Any:
    make, recipe.make = recipe.make, None  # since the cache keeps the recipe, but not what it holds
    assert make is not None
    return make()

"""The table of ATen operators in JAX, and the helpers of the files that fill it.

``OPERATORS`` maps an overload (``aten.max.dim``) or a whole packet (``aten.add``) to a function of
JAX arrays with the arguments of torch's schema. Results need not have torch's dtype: the
translation casts them. Gradients at ties and kinks equal torch's, so that both backends sample with
the same gradient.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

aten = torch.ops.aten


OPERATORS: dict[Any, Callable] = {}

# Operators that draw random numbers: functions of a key, the result's shape and dtype, and torch's
# arguments.
RANDOM: dict[Any, Callable] = {}


# torch multiplies float32 in float32; JAX on an accelerator would round to TF32.
EXACT = lax.Precision.HIGHEST


def register(*operators: Any) -> Callable[[Callable], Callable]:
    """Register the decorated function for overloads or packets."""

    def enter(function: Callable) -> Callable:
        OPERATORS.update(dict.fromkeys(operators, function))
        return function

    return enter


def lookup(operator: Any, table: Mapping[Any, Callable] = OPERATORS) -> Callable | None:
    """The function for an overload, else for its packet, else None."""
    return table.get(operator) or table.get(getattr(operator, "overloadpacket", None))


def as_dtype(tensor: Any) -> np.dtype:
    """The JAX dtype of a torch tensor, or of a torch dtype."""
    return jnp.dtype(str(getattr(tensor, "dtype", tensor)).removeprefix("torch."))


def cast(x: Any, tensor: Any) -> jax.Array:
    """Cast ``x`` to the dtype of a torch tensor (or a torch dtype); without x64 to 32 bits."""
    return lax.convert_element_type(x, jax.dtypes.canonicalize_dtype(as_dtype(tensor)))


def axes(dim: Any) -> Any:
    """Convert a torch ``dim`` to a JAX ``axis``; None or an empty list means all."""
    if dim is None or isinstance(dim, int):
        return dim
    return tuple(dim) or None


def each(value: Any, n: int) -> list[int]:
    """Expand a per-dimension setting of torch to ``n`` numbers; one number applies to all
    dimensions."""
    value = [value] if isinstance(value, int) else list(value)
    return value * n if len(value) == 1 else value


def table(functions: dict[str, Callable]) -> None:
    """Register functions by the names of their packets."""
    OPERATORS.update({getattr(aten, name): function for name, function in functions.items()})

"""Functions of one draw, evaluated at many: by ``vmap`` in chunks, or one by one."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_bdl.errors import BdlWarning
from pyro_bdl.modules import vmappable

Draws = dict[str, Tensor]


def number_of_draws(draws: Draws) -> int:
    return next(iter(draws.values())).shape[0]


def map_draws(function: Callable[[Draws], Any], draws: Draws) -> Any:
    """Stack function(draw) over the leading axis of ``draws``; random numbers differ by draw.

    Uses ``vmap``, or a loop where an operator of the network has no batching rule.
    """
    try:
        with vmappable():
            return torch.vmap(function, randomness="different")(draws)
    except RuntimeError as error:
        if not _is_vmap_failure(error):
            raise
        warnings.warn(
            "the network cannot be vectorised over draws, which are taken one by one instead: "
            f"{str(error).splitlines()[0]}",
            BdlWarning,
            stacklevel=3,
        )
        return loop_draws(function, draws)


def loop_draws(function: Callable[[Draws], Any], draws: Draws) -> Any:
    """Stack function(draw) over the leading axis of ``draws``, one draw after the other."""
    results = [
        function({name: value[i] for name, value in draws.items()})
        for i in range(number_of_draws(draws))
    ]
    flat = [tree_flatten(result) for result in results]
    leaves = [torch.stack(leaf) for leaf in zip(*(leaves for leaves, _ in flat), strict=True)]
    return tree_unflatten(leaves, flat[0][1])


def _is_vmap_failure(error: RuntimeError) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("vmap", "batching rule", "functorch", "functionalize"))

"""The arguments of a call, split into tensors and constants."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_bdl.tracing.trace import NotTraceable
from pyro_bdl.utils.trees import TreeSpec, tree_flatten, tree_unflatten

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Arguments(NamedTuple):
    """The tensors among a call's arguments, and the rest.

    :param constants: for each argument its type and value; None for a tensor.
    """

    tensors: list[Tensor]
    constants: tuple[tuple[type, Any] | None, ...]
    structure: TreeSpec

    @property
    def key(self) -> Hashable:
        """What a graph depends on besides the tensors' values."""
        kinds = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in self.tensors]
        return tuple(kinds), self.constants, str(self.structure)

    def rebuild(self, tensors: Sequence[Tensor]) -> tuple[tuple, dict[str, Any]]:
        """``(args, kwargs)`` with other tensors."""
        left = iter(tensors)
        leaves = [next(left) if c is None else c[1] for c in self.constants]
        return tree_unflatten(leaves, self.structure)


def split(args: tuple, kwargs: dict[str, Any]) -> Arguments:
    """Separate the tensors among a call's arguments from the rest.

    :raises NotTraceable: for arguments whose changes cannot be noticed, and for sparse tensors.
    """
    leaves, structure = tree_flatten((args, kwargs))
    for leaf in leaves:
        if type(leaf) not in (Tensor, nn.Parameter) and not isinstance(leaf, _CONSTANTS):
            raise NotTraceable(
                f"an argument holds {type(leaf).__name__}, which may change from step to step: "
                "pass tensors, numbers and words"
            )
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(tensor.layout is not torch.strided for tensor in tensors):
        raise NotTraceable("an argument is a sparse tensor")
    # with their types, since 1, 1.0 and True are equal
    rest = (None if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)
    return Arguments(tensors, tuple(rest), structure)

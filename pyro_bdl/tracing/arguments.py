"""The arguments of a call, split into tensors and constants."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_bdl.tracing.trace import NotTraceable

Call = tuple[tuple, dict[str, Any]]

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Given(NamedTuple):
    """The tensors among a call's arguments.

    :param tensors: in order.
    :param kind: the properties for which a graph is valid: shapes, strides, dtypes, devices, and
        all arguments that are not tensors.
    :param rebuild: a function from such tensors to ``(args, kwargs)``.
    """

    tensors: Sequence[Tensor]
    kind: Hashable
    rebuild: Callable[[Sequence[Tensor]], Call]


def read(args: tuple, kwargs: dict[str, Any]) -> Given:
    """Separate the tensors among a call's arguments from the rest.

    :raises NotTraceable: for arguments whose changes cannot be noticed, and for sparse tensors.
    """
    if not kwargs and all(type(value) is Tensor for value in args):
        return Given(args, _kinds(args), _positional)
    leaves, structure = tree_flatten((args, kwargs))
    tensors: list[Tensor] = []
    constants: list[tuple[type, Any] | None] = []
    for leaf in leaves:
        if type(leaf) in (Tensor, nn.Parameter):
            tensors.append(leaf)
            constants.append(None)
        elif isinstance(leaf, _CONSTANTS):
            constants.append((type(leaf), leaf))  # 1, 1.0 and True differ
        else:
            raise NotTraceable(
                f"an argument holds {type(leaf).__name__}, which may change from step to step: "
                "pass tensors, numbers and words"
            )

    def rebuild(values: Sequence[Tensor]) -> Call:
        left = iter(values)
        return tree_unflatten([next(left) if c is None else c[1] for c in constants], structure)

    return Given(tensors, (_kinds(tensors), tuple(constants), str(structure)), rebuild)


def _positional(values: Sequence[Tensor]) -> Call:
    return tuple(values), {}


def _kinds(tensors: Sequence[Tensor]) -> Hashable:
    if any(tensor.layout is not torch.strided for tensor in tensors):
        raise NotTraceable("an argument is a sparse tensor")
    return tuple([(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors])

"""Modes below autograd, and tensors without numbers: torch's classes for them, imported in one
place, since torch has no public names for them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing  # noqa: F401
from torch._subclasses.fake_tensor import (  # noqa: F401
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pyro_bdl.utils.trees import tensors_in

without_modes = _disable_current_modes
_aten: Any = torch.ops.aten
# which read shape and dtype of a tensor, and none of its numbers
_SHAPES_ALONE = {
    _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.empty_like,
    _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty, _aten.new_empty_strided,
    _aten.rand_like, _aten.randn_like, _aten.randint_like,
}  # fmt: skip


class Origins(TorchDispatchMode):
    """Follows which of some tensors others are computed from, by the operators that run inside
    ``with``, whatever their numbers. What goes through numbers of Python or NumPy is not followed.

    :param sources: tensors that share no memory with others.
    """

    def __init__(self, sources: Iterable[Tensor]) -> None:
        super().__init__()
        # by memory; the tensors are held, so that it is not used again meanwhile
        self._known = {_memory(s): (s, frozenset({n})) for n, s in enumerate(sources)}

    def of(self, tensor: Tensor) -> frozenset[int]:
        """The numbers of the sources that a tensor is computed from; -1 stands for all tensors
        that were there before."""
        return self._known.get(_memory(tensor), (tensor, frozenset({-1})))[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [] if func.overloadpacket in _SHAPES_ALONE else tensors_in((args, kwargs))
        found = frozenset[int]().union(*map(self.of, read))
        for tensor in tensors_in(result):
            self._known[_memory(tensor)] = tensor, found
        return result


def _memory(tensor: Tensor) -> tuple[str, int]:
    strided = tensor.layout is torch.strided and tensor.numel() > 0
    return ("", tensor.untyped_storage().data_ptr()) if strided else ("object", id(tensor))

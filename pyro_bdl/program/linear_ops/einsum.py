"""Einsums that are products of data with a weight, rewritten as ``F.linear`` of views."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor


def as_linear(args: tuple, is_weight: Callable[[Any], bool]) -> Callable[[], Tensor] | None:
    """A function that computes an einsum as a product z = a w'; None for other einsums.

    An example is "bi,oi->bo". Axes may have any order, the weight may have several
    ("btd,hdk->bthk"), and an ellipsis may stand for axes of the data. Each axis of the weight must
    either be summed over, and also be an axis of the data, or be an axis of the output only. All
    other axes of the data are axes of the output.

    :param args: the arguments of ``torch.einsum``: the equation and two operands.
    :param is_weight: whether an operand is the weight; exactly one must be.
    """
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    left, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow or len(operands) != 2 or is_weight(operands[0]) == is_weight(operands[1]):
        return None
    number = 1 if is_weight(operands[1]) else 0
    weight, inputs = operands[number], operands[1 - number]
    of_weight, of_inputs = left.split(",")[number], left.split(",")[1 - number]
    if "..." in of_inputs:  # digits cannot be letters of an einsum
        dots = "".join(map(str, range(inputs.dim() - len(of_inputs) + 3)))
        of_inputs, output = of_inputs.replace("...", dots), output.replace("...", dots)
    summed = "".join(axis for axis in of_weight if axis in of_inputs)
    kept = "".join(axis for axis in of_weight if axis not in of_inputs)
    rest = "".join(axis for axis in of_inputs if axis not in of_weight)
    size = dict(zip(of_weight, weight.shape, strict=False))
    length = dict(zip(of_inputs, inputs.shape, strict=False))
    if (
        not summed
        or len(size) < len(of_weight)  # a diagonal
        or len(length) < len(of_inputs)
        or sorted(output) != sorted(rest + kept)
        or any(size[axis] != length[axis] for axis in summed)  # broadcast
    ):
        return None

    def product() -> Tensor:
        matrix = _ordered(weight, of_weight, kept + summed)
        data = _ordered(inputs, of_inputs, rest + summed)
        if len(summed) > 1:
            matrix, data = matrix.flatten(len(kept)), data.flatten(len(rest))
        if len(kept) != 1:
            matrix = matrix.reshape(-1, matrix.shape[-1])
        result = F.linear(data, matrix)
        if len(kept) != 1:
            result = result.reshape((*result.shape[:-1], *(size[axis] for axis in kept)))
        return _ordered(result, rest + kept, output)

    return product


def _ordered(x: Tensor, axes: str, order: str) -> Tensor:
    return x if axes == order else x.permute([axes.index(axis) for axis in order])

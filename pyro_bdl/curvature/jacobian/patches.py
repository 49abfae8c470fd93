"""Convolution as a matrix product: the patches of an image under the kernel."""

from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from pyro_bdl.program.linear_ops.recognize import AffineOp


def unfolding(op: AffineOp) -> Callable[[Tensor], Tensor]:
    """The function from the images of a convolution to their patches."""
    kernel = tuple(op.weight.shape[2:])
    return partial(
        patches,
        kernel=kernel,
        stride=_spread(op.settings.get("stride", 1), len(kernel)),
        dilation=_spread(op.settings.get("dilation", 1), len(kernel)),
        padding=op.settings.get("padding", 0),
        groups=op.groups,
    )


def patches(
    images: Tensor,
    *,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: str | int | tuple[int, ...],
    groups: int,
) -> Tensor:
    """Return the inputs of every output position, (n, positions, groups, channels/groups * kernel).

    :param images: (n, channels, *spatial), of any number of spatial dimensions.
    :param padding: as in ``torch.nn.functional.conv2d``, including "same" and "valid".
    """
    dims = len(kernel)
    images = F.pad(images, _padding(padding, kernel, dilation))
    if dims <= 2:
        return _image_patches(images, kernel, stride, dilation, groups)
    for d in range(dims):
        reach = dilation[d] * (kernel[d] - 1) + 1
        images = images.unfold(2 + d, reach, stride[d])
        if dilation[d] > 1:
            images = images[..., :: dilation[d]]
    n, channels = images.shape[:2]
    images = images.unflatten(1, (groups, channels // groups))
    # (n, groups, channels, *positions, *kernel)
    positions = tuple(range(3, 3 + dims))
    window = tuple(range(3 + dims, 3 + 2 * dims))
    images = images.permute(0, *positions, 1, 2, *window)
    return images.reshape(n, -1, groups, channels // groups * _product(kernel))


def _image_patches(
    images: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """Return patches by torch's ``unfold``, which is faster; sequences are images of height 1."""
    if len(kernel) == 1:
        images, kernel = images[:, :, None], (1, *kernel)
        stride, dilation = (1, *stride), (1, *dilation)
    columns = F.unfold(images, kernel, dilation=dilation, stride=stride)  # (n, in, positions)
    return columns.mT.unflatten(-1, (groups, -1))


def _padding(
    padding: str | int | tuple[int, ...], kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> list[int]:
    """Return padding in the order of ``F.pad``: last dimension first, left and right."""
    result: list[int] = []
    for d in reversed(range(len(kernel))):
        if padding == "valid":
            result += [0, 0]
        elif padding == "same":
            total = dilation[d] * (kernel[d] - 1)
            result += [total // 2, total - total // 2]
        else:
            assert not isinstance(padding, str)
            size = padding if isinstance(padding, int) else padding[d % len(padding)]
            result += [size, size]
    return result


def _product(numbers: tuple[int, ...]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def _spread(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * (dims if len(value) == 1 else 1)

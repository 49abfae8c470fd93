"""The data axis of an operation's output."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.affine_uses import AffineUse


class DatumAxis(NamedTuple):
    """The axis ``dim`` of an operation's output whose rows number the data.

    The rows of a datum are neighbors (``contiguous``) or n rows apart.
    """

    dim: int
    contiguous: bool

    def first(self, rows: Tensor, num_data: int) -> Tensor:
        """Return (*lead, ...) as (n, rows of a datum along the axis, *other lead, ...)."""
        rows = rows.movedim(self.dim, 0)
        if self.contiguous:
            return rows.unflatten(0, (num_data, -1))
        return rows.unflatten(0, (-1, num_data)).transpose(0, 1)


class Alignment(NamedTuple):
    """The data axes of all uses, which every batch of a program is checked to share.

    ``axes`` holds the data axis of each use, or None if it has none or the outputs do not depend on
    it. ``others`` are the sites whose gradients do not follow from aligned uses. ``shared`` are the
    sites in ``others`` that only affect outputs common to all data, such as a noise scale.
    """

    axes: tuple[DatumAxis | None, ...]
    others: tuple[str, ...]
    shared: tuple[str, ...]


def as_rows(use: AffineUse, output: Tensor) -> Tensor:
    return output if use.to_rows is None else use.to_rows(output)


def aligned_with(mask: Tensor, output: Tensor) -> Tensor:
    """Return a mask over the data (n,) in a shape that broadcasts against an output (n, ...)."""
    if len(mask) == 1:
        return mask.to(output.dtype).reshape((1,) * output.dim())
    return mask.to(output.dtype).reshape(-1, *(1,) * (output.dim() - 1))


def levels_of(num_data: int, device: torch.device) -> Iterator[Tensor]:
    """Yield tensors (n,) of powers of two; any two data have different powers in at least one of
    them."""
    numbers = torch.arange(num_data, device=device)
    while numbers.any():
        yield torch.exp2((numbers % 16 - 8).to(torch.float32))
        numbers = numbers // 16


def datum_axes(use: AffineUse, num_data: int) -> list[DatumAxis]:
    """Return the axes of an operation's output that may be the data axis, likely ones first."""
    shape = as_rows(use, torch.empty(use.output_shape, device="meta")).shape
    candidates = use.reduce_dims if use.kind == "scale" else range(len(shape) - 1)
    axes = []
    for repeated in (False, True):
        for d in candidates:
            if shape[d] == 0 or shape[d] % num_data or (shape[d] > num_data) != repeated:
                continue
            axes.append(DatumAxis(d, True))
            if repeated and num_data > 1:
                axes.append(DatumAxis(d, False))
    return axes


def scales_by(before: Tensor, after: Tensor, axis: DatumAxis, levels: Tensor) -> bool:
    """Return True if the rows of every datum along the axis were multiplied by its level."""
    count = before.shape[axis.dim]
    repeat = count // len(levels)
    factor = levels.repeat_interleave(repeat) if axis.contiguous else levels.repeat(repeat)
    before = before.movedim(axis.dim, 0).reshape(count, -1)
    after = after.movedim(axis.dim, 0).reshape(count, -1)
    expected = before * factor.to(before.dtype)[:, None]
    slack = rounding_of(before) * expected.abs().amax(1)
    return bool(((after - expected).abs().amax(1) <= slack).all())


def rounding_of(like: Tensor) -> float:
    """Return the possible difference of equal numbers by rounding, relative to their terms'
    sizes."""
    if like.dtype == torch.float64:
        return 1e-9
    if like.dtype != torch.float32:
        return 3e-2
    return 3e-3 if like.is_cuda else 1e-5  # TF32

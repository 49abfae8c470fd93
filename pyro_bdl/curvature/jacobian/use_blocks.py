"""Blocks of a Jacobian from affine uses: positions of entries, and gradients in rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.affine_uses import AffineUse
from pyro_bdl.curvature.jacobian.block_position import BlockPosition
from pyro_bdl.curvature.jacobian.datum_axes import DatumAxis, as_rows
from pyro_bdl.curvature.jacobian.jacobian import LookupBlock, same_entries
from pyro_bdl.program.subset import Subset


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def repeats(indices: Tensor | None) -> bool:
    return indices is not None and len(indices.unique()) < indices.numel()


def first_uses_of_entries(uses: Sequence[AffineUse]) -> list[int]:
    """Return for each use the number of the first use of the same entries in the same way."""
    numbers: list[int] = []
    alike: dict[Any, list[AffineUse]] = {}
    for use in uses:
        key = use.site, use.kind, use.shape, use.inputs is None, use.indices is None
        others = alike.setdefault(key, [])
        first = next((o for o in others if same_entries(o.indices, use.indices)), use)
        if first is use:
            others.append(use)
        numbers.append(first.number)
    return numbers


def position_of(use: AffineUse, subset: Subset, number: int) -> BlockPosition | None:
    """Return the position of a use's entries in the subset; None if none of them is in it.

    :param number: the number of the first use of these entries, which names the block.
    """
    key = use.site, number
    part, chosen = subset.parts[use.site], subset.chosen[use.site]
    if chosen is None:
        if use.indices is None:
            return BlockPosition(key, part, uses=(use.number,))
        return BlockPosition(key, use.indices.reshape(-1) + part.start, uses=(use.number,))
    entries = subset.layout.latents[use.site].size
    table = torch.full((entries,), -1, dtype=torch.long, device="cpu")
    table[chosen.cpu()] = torch.arange(part.start, part.stop, device="cpu")
    positions = table if use.indices is None else table[use.indices.reshape(-1).cpu()]
    inside = (positions >= 0).nonzero()[:, 0]
    if not len(inside):
        return None
    device = chosen.device if use.inputs is None else use.inputs.device
    some = None if len(inside) == len(positions) else inside.to(device)
    return BlockPosition(key, positions[inside].to(device), some, (use.number,))


def gradient_rows(
    use: AffineUse, axis: DatumAxis, gradient: Tensor | None, num_data: int, like: Tensor
) -> Tensor:
    """Return a gradient of z as (n, T, groups, out), or (n, m) for a scale."""
    if gradient is None:
        gradient = like.new_zeros(use.output_shape)
    gradient = gradient.to(working_dtype(gradient.dtype))
    if use.kind == "scale":
        if use.inputs is not None:
            gradient = gradient * use.inputs
        rest = [d for d in range(gradient.dim()) if d != axis.dim]
        rows = axis.first(gradient, num_data)
        summed = [1] + [2 + i for i, d in enumerate(rest) if d in use.reduce_dims]
        return rows.sum(summed).reshape(num_data, -1)
    rows = axis.first(as_rows(use, gradient), num_data)
    return rows.flatten(1, -2).unflatten(-1, (use.groups, -1))


def lookup(
    indices: Tensor, stacked: Tensor, shape: torch.Size, position: BlockPosition
) -> LookupBlock:
    """Return a block of a table, with the gradients of the same row and datum summed."""
    num_rows, features = shape
    num_data = len(indices)
    indices = indices.reshape(num_data, -1)
    keys = torch.arange(num_data, device=indices.device)[:, None] * num_rows + indices
    looked_up = indices.reshape(-1) >= 0
    unique, inverse = keys.reshape(-1)[looked_up].unique(return_inverse=True)
    flat = stacked.reshape(len(stacked), -1, features)[:, looked_up]
    sums = flat.new_zeros(len(stacked), len(unique), features).index_add(1, inverse, flat)
    return LookupBlock(position, unique // num_rows, unique % num_rows, sums, num_data, num_rows)

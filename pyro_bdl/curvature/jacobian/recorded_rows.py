"""Uses of latents by single rows of data, and the blocks of a Jacobian that follow from them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.affine_uses import AffineUse, UseRecorder
from pyro_bdl.curvature.jacobian.jacobian import (
    Block,
    BlockPosition,
    DenseBlock,
    LookupBlock,
    ProductBlock,
    added,
    merged,
    same_entries,
)
from pyro_bdl.program.subset import Subset


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class RecordedRows:
    """A run over n data with all uses of latents, datum by datum.

    :param recorders: of one map over all rows, or of each row in a loop.
    :param inputs: of the uses that have some, by their place, with the rows in front.
    """

    def __init__(
        self,
        subset: Subset,
        recorders: Sequence[UseRecorder],
        num_data: int,
        inputs: Mapping[int, Tensor],
    ) -> None:
        self.subset, self.num_data, self.inputs = subset, num_data, inputs
        self._recorders, self.together = recorders, recorders[0].mapped
        self.uses = recorders[0].uses
        self.num_operations = len(recorders[0].edges)
        self._unfolded: dict[int, Tensor] = {}
        firsts = _first_uses_of_entries(self.uses)
        self._positions = [
            _position(use, subset, first) for use, first in zip(self.uses, firsts, strict=True)
        ]

    @property
    def numbers(self) -> float:
        """How many numbers of one datum the operations read and make."""
        read = sum(inputs.numel() for inputs in self.inputs.values())
        return read / self.num_data + sum(use.output_shape.numel() for use in self.uses)

    def gradients(self, outputs: Sequence[Tensor], column: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of <column, outputs> in the operations' results z, (n, *shape) each."""
        edges = [edge for recorder in self._recorders for edge in recorder.edges]
        known = [edge for edge in edges if edge is not None]
        pairs = [
            (out, c.reshape(out.shape))
            for out, c in zip(outputs, column, strict=True)
            if out.requires_grad
        ]
        if not known or not pairs:
            return [None] * self.num_operations
        found = iter(
            torch.autograd.grad(
                [out for out, _ in pairs], known, [c for _, c in pairs],
                retain_graph=True, allow_unused=True,
                create_graph=self._recorders[0].differentiable,
            )
        )  # fmt: skip
        values = [None if edge is None else next(found) for edge in edges]
        if self.together:
            return values
        rows = [values[start :: self.num_operations] for start in range(self.num_operations)]
        return [_stacked(parts) for parts in rows]

    def blocks(self, outputs: Sequence[Tensor], columns: Sequence[Sequence[Tensor]]) -> list[Block]:
        """The blocks of all sites, for K columns."""
        pulled = [self.gradients(outputs, column) for column in columns]
        by_site: dict[str, list[tuple[AffineUse, Block]]] = {}
        stacks: dict[Any, Tensor] = {}  # shared by the weight and the bias of an operation
        for place, use in enumerate(self.uses):
            gradients = [column[use.op] for column in pulled]
            if all(gradient is None for gradient in gradients):
                continue
            key = (use.op, use.groups) if use.kind == "product" else place
            if key not in stacks:
                found = [self._rows(place, gradient) for gradient in gradients]
                stacks[key] = found[0][None] if len(found) == 1 else torch.stack(found)
            by_site.setdefault(use.site, []).append((use, self._block(place, stacks[key])))
        result: list[Block] = []
        for site, members in by_site.items():
            blocks = [block for _, block in members]
            if self.subset.chosen[site] is not None:
                result.append(self._some_entries(site, members))
            elif any(use.kind == "dense" for use, _ in members):
                result.append(added(blocks, self.subset.parts[site]))
            else:
                result += merged(blocks, self.subset.parts[site])
        return result

    def _some_entries(self, site: str, members: list[tuple[AffineUse, Block]]) -> DenseBlock:
        """Rows over the entries of a site that are in the subset."""
        latent, chosen = self.subset.layout.latents[site], self.subset.chosen[site]
        assert chosen is not None
        table = torch.full((latent.size,), -1, device=latent.device)
        table[chosen.to(latent.device)] = torch.arange(len(chosen), device=latent.device)
        values: Any = 0.0
        for use, block in members:
            where = table if use.indices is None else table[use.indices.reshape(-1)]
            inside = (where >= 0).nonzero()[:, 0]
            rows = block.rows(inside)
            whole = rows.new_zeros(*rows.shape[:2], len(chosen))
            values = values + whole.index_add_(2, where[inside], rows)
        return DenseBlock(BlockPosition((site, -1), self.subset.parts[site]), values)

    def product(self, place: int) -> tuple[BlockPosition, Any, torch.Size]:
        """The position of a product, its inputs as a function (None for a bias), and its shape."""
        use, position = self.uses[place], self._positions[place]
        source = None if use.inputs is None else lambda: self._unfolded_inputs(place)
        return position, source, use.shape

    def _block(self, place: int, stacked: Tensor) -> Block:
        use = self.uses[place]
        position, source, shape = self.product(place)
        if use.kind == "dense":
            return DenseBlock(position, stacked)
        if use.kind == "lookup":
            return _lookup(self.inputs[place], stacked, shape, position)
        return ProductBlock(position, source, stacked, shape)

    def _rows(self, place: int, gradient: Tensor | None) -> Tensor:
        """A gradient of z as (n, T, groups, out), or (n, m) for a dense use."""
        use = self.uses[place]
        if gradient is None:
            like = self.subset.layout.latents[use.site]
            shape = (self.num_data, *use.output_shape)
            gradient = torch.zeros(shape, dtype=use.dtype, device=like.device)
        gradient = gradient.to(working_dtype(gradient.dtype))
        if use.kind == "dense":
            return gradient.reshape(self.num_data, -1)
        rows = gradient if use.to_rows is None else torch.vmap(use.to_rows)(gradient)
        rows = rows[:, None] if rows.dim() == 2 else rows
        return rows.flatten(1, -2).unflatten(-1, (use.groups, -1))

    def _unfolded_inputs(self, place: int) -> Tensor:
        """a of a product as (n, T, groups, in); patches are kept for other columns."""
        if place not in self._unfolded:
            use, inputs = self.uses[place], self.inputs[place]
            inputs = inputs.to(working_dtype(inputs.dtype))
            if use.unfold is None:
                inputs = inputs.reshape(self.num_data, -1, 1, inputs.shape[-1])
            else:
                several = inputs.shape[:2]  # data, and images of a datum
                inputs = use.unfold(inputs.flatten(0, 1)).unflatten(0, several)
            self._unfolded[place] = inputs.flatten(1, -3)
        return self._unfolded[place]


def _stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    like = next((part for part in parts if part is not None), None)
    if like is None:
        return None
    return torch.stack([torch.zeros_like(like) if part is None else part for part in parts])


def _first_uses_of_entries(uses: Sequence[AffineUse]) -> list[int]:
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


def _position(use: AffineUse, subset: Subset, number: int) -> BlockPosition:
    """Return the position of a use's entries in the subset, where this has the whole site.

    :param number: the number of the first use of these entries, which names the block.
    """
    part = subset.parts[use.site]
    indices = part if use.indices is None else use.indices.reshape(-1) + part.start
    return BlockPosition((use.site, number), indices, (use.number,))


def _lookup(
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

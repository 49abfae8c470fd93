"""A batch of data run through a program once, ready for any column of its Jacobian."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian import Block, Dense, Jacobian, Lookup, Place, Product, merged
from pyro_bdl.curvature.operations import LinearOperations, Use
from pyro_bdl.curvature.subset import Subset
from pyro_bdl.layout import Layout
from pyro_bdl.modules import evaluation_mode, preserved_buffers, vmappable
from pyro_bdl.program import Run, leave_open, record

Outputs = Callable[[Run], Sequence[Tensor]]


class DatumAxis(NamedTuple):
    """How the rows of an operation's output number the data: along ``dim``, each datum's rows
    next to each other (``contiguous``) or n apart."""

    dim: int
    contiguous: bool

    def first(self, rows: Tensor, num_data: int) -> Tensor:
        """(*lead, ...) as (n, rows of a datum along the axis, *other lead, ...)."""
        rows = rows.movedim(self.dim, 0)
        if self.contiguous:
            return rows.unflatten(0, (num_data, -1))
        return rows.unflatten(0, (-1, num_data)).transpose(0, 1)


class Alignment(NamedTuple):
    """What a first look at a program's outputs tells, the same for every batch of it.

    ``axes``: for each use its datum axis, None where it has none or the outputs do not depend on
    it. ``others``: the sites whose gradients do not follow from aligned uses.
    """

    axes: tuple[DatumAxis | None, ...]
    others: tuple[str, ...]


def constrained(layout: Layout, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Latents in their supports from unconstrained ones; the same tensors where both agree."""
    return {
        name: leaves[name] if latent.transform is None else latent.transform(leaves[name])
        for name, latent in layout.latents.items()
    }


class Linearization:
    """One batch at one value of the latents, with the graph of its outputs kept.

    :param model: the program.
    :param subset: the latents of interest; the others count as constants.
    :param vector: where, an unconstrained vector (P,).
    :param known: alignments found in earlier batches of the same program; filled here.
    """

    def __init__(
        self,
        model: Callable,
        subset: Subset,
        vector: Tensor,
        args: tuple,
        kwargs: Mapping[str, Any],
        *,
        known: dict[Any, Alignment] | None = None,
    ) -> None:
        self.model, self.subset, self.vector = model, subset, vector.detach()
        self.args, self.kwargs = args, kwargs
        self.known = {} if known is None else known
        layout = subset.layout
        self.leaves = layout.unflatten(self.vector)
        for name in subset.parts:
            self.leaves[name] = self.leaves[name].clone().requires_grad_()
        with torch.enable_grad(), evaluation_mode(), preserved_buffers(), vmappable():
            values = constrained(layout, self.leaves)
            seen = {n: v for n, v in values.items() if v is self.leaves[n] and n in subset.parts}
            with LinearOperations(seen) as operations:
                self.run: Run = record(model, values, args, kwargs, draw=leave_open)
        self.uses = operations.uses
        self.unmatched = operations.unmatched | {
            use.site for use in self.uses if _repeats(use.indices)
        }

    def pullback(self, outputs: Outputs, num_data: int, *, label: Any = None) -> "Pullback":
        """Outputs of the run, ready to be differentiated datum by datum.

        :param outputs: which, each of shape (n, ...), or of any shape where n = 1.
        :param label: names these outputs, so that what is found of them may be used again.
        """
        return Pullback(self, outputs, num_data, label)


class Pullback:
    """Outputs of a linearization as functions of the subset, datum by datum."""

    def __init__(
        self, linearization: Linearization, outputs: Outputs, num_data: int, label: Any
    ) -> None:
        self.at, self.read, self.num_data = linearization, outputs, num_data
        self.outputs = list(outputs(linearization.run))
        known = linearization.known.get(label) if label is not None else None
        self.alignment = known if known is not None else self._align()
        if label is not None and num_data > 1:
            linearization.known[label] = self.alignment

    def gradients(
        self, cotangents: Sequence[Tensor], inputs: Sequence[Any]
    ) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            self.outputs, list(inputs), list(cotangents), retain_graph=True, allow_unused=True
        )

    def jacobian(self, columns: Sequence[Sequence[Tensor]]) -> Jacobian:
        """The gradients of sum_j <column_kj, output_j> in the subset, for every datum.

        :param columns: K cotangents, each with a tensor for every output.
        """
        at = self.at
        aligned = [
            (use, axis)
            for use, axis in zip(at.uses, self.alignment.axes, strict=True)
            if axis is not None and use.site not in self.alignment.others
        ]
        edges = [use.edge for use, _ in aligned]
        pulled = [self.gradients(column, edges) for column in columns] if edges else []
        by_site: dict[str, list[tuple[Block, Tensor | None]]] = {}
        for number, (use, axis) in enumerate(aligned):
            place = _place(use, at.subset, (use.site, use.number))
            if place is not None:
                found = [_rows(use, axis, g[number], self.num_data, at.vector) for g in pulled]
                block = _block(use, axis, torch.stack(found), self.num_data, place)
                by_site.setdefault(use.site, []).append((block, use.indices))
        blocks: list[Block] = []
        for members in by_site.values():
            blocks += merged([block for block, _ in members], [own for _, own in members])
        if self.alignment.others:
            blocks += self._dense(columns)
        like = at.vector.new_empty(0, dtype=_working(at.vector.dtype))
        return Jacobian(blocks, len(columns), self.num_data, at.subset.size, like)

    # Which rows belong to which datum

    def _align(self) -> Alignment:
        """Send noise back from some of the data only, and see where it arrives."""
        at = self.at
        generator = torch.Generator().manual_seed(0)
        mask = torch.randperm(self.num_data, generator=generator) < max(1, self.num_data // 2)
        mask = mask.to(at.vector.device)
        noise = []
        for output in self.outputs:
            drawn = torch.randn(output.shape, generator=generator).to(output)
            noise.append(drawn * _aligned_with(mask, output))
        names = list(at.subset.parts)
        inputs = [*(use.edge for use in at.uses), *(at.leaves[name] for name in names)]
        found = self.gradients(noise, inputs)
        arrived, of_sites = found[: len(at.uses)], found[len(at.uses) :]
        axes = tuple(
            None if gradient is None else _datum_axis(use, gradient, mask)
            for use, gradient in zip(at.uses, arrived, strict=True)
        )
        lost = {
            use.site
            for use, axis, gradient in zip(at.uses, axes, arrived, strict=True)
            if axis is None and gradient is not None
        }
        by_use = {
            use.site for use, axis in zip(at.uses, axes, strict=True) if axis is not None
        }
        others = tuple(
            name
            for name, gradient in zip(names, of_sites, strict=True)
            if gradient is not None
            and (name in at.unmatched or name in lost or name not in by_use)
        )
        return Alignment(axes, others)

    # Latents outside linear operations

    def _dense(self, columns: Sequence[Sequence[Tensor]]) -> list[Block]:
        """Rows of the latents whose gradients no use gives: by forward or backward passes."""
        parts = [self.at.subset.parts[site] for site in self.alignment.others]
        sizes = [part.stop - part.start for part in parts]
        rows = None
        if sum(sizes) <= self.num_data * len(columns):
            rows = self._forward_rows(columns, parts)
        if rows is None:
            rows = self._backward_rows(columns)
        rows = rows.to(_working(rows.dtype))
        return [
            Dense(Place((site, 0), part), values)
            for site, part, values in zip(
                self.alignment.others, parts, rows.split(sizes, -1), strict=True
            )
        ]

    def _forward_rows(
        self, columns: Sequence[Sequence[Tensor]], parts: Sequence[slice]
    ) -> Tensor | None:
        """One forward derivative for each latent number; None where an operator has none."""
        at, layout = self.at, self.at.subset.layout
        where = torch.cat([torch.arange(part.start, part.stop) for part in parts])
        if at.subset.indices is not None:
            where = at.subset.indices.cpu()[where]

        def outputs(vector: Tensor) -> tuple[Tensor, ...]:
            values = constrained(layout, layout.unflatten(vector))
            run = record(at.model, values, at.args, at.kwargs, draw=leave_open)
            return tuple(self.read(run))

        rows = []
        try:
            with evaluation_mode(), preserved_buffers(), vmappable():
                for position in where.tolist():
                    tangent = torch.zeros_like(at.vector)
                    tangent[position] = 1.0
                    moved = torch.func.jvp(outputs, (at.vector,), (tangent,))[1]
                    rows.append([self._contract(column, moved) for column in columns])
        except (RuntimeError, NotImplementedError):
            return None
        return torch.stack([torch.stack(row) for row in rows], -1)

    def _contract(self, column: Sequence[Tensor], moved: Sequence[Tensor]) -> Tensor:
        """<column, moved> for every datum, (n,)."""
        terms = [
            (c * m).reshape(self.num_data, -1).sum(-1) for c, m in zip(column, moved, strict=True)
        ]
        return torch.stack(terms).sum(0)

    def _backward_rows(self, columns: Sequence[Sequence[Tensor]]) -> Tensor:
        """One backward pass for each datum and column."""
        subset = self.at.subset
        leaves = [self.at.leaves[name] for name in self.alignment.others]
        data = torch.arange(self.num_data, device=self.at.vector.device)
        rows = []
        for column in columns:
            for datum in data:
                only = [c * _aligned_with(data == datum, c) for c in column]
                parts = []
                found = self.gradients(only, leaves)
                for name, leaf, gradient in zip(
                    self.alignment.others, leaves, found, strict=True
                ):
                    flat = torch.zeros_like(leaf) if gradient is None else gradient
                    chosen = subset.chosen[name]
                    flat = flat.reshape(-1)
                    parts.append(flat if chosen is None else flat[chosen.to(flat.device)])
                rows.append(torch.cat(parts))
        return torch.stack(rows).unflatten(0, (len(columns), self.num_data))


def _working(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _aligned_with(mask: Tensor, output: Tensor) -> Tensor:
    """A mask over the data (n,), to be multiplied with an output (n, ...)."""
    if len(mask) == 1:
        return mask.to(output.dtype).reshape((1,) * output.dim())
    return mask.to(output.dtype).reshape(-1, *(1,) * (output.dim() - 1))


def _repeats(indices: Tensor | None) -> bool:
    return indices is not None and len(indices.unique()) < indices.numel()


def _as_rows(use: Use, output: Tensor) -> Tensor:
    return output if use.to_rows is None else use.to_rows(output)


def _datum_axis(use: Use, gradient: Tensor, mask: Tensor) -> DatumAxis | None:
    """The axis along which the gradient is zero outside of the data in ``mask``."""
    rows = _as_rows(use, gradient) != 0
    dims = range(rows.dim()) if use.kind == "scale" else range(rows.dim() - 1)
    count = len(mask)
    candidates = [d for d in dims if rows.shape[d] and rows.shape[d] % count == 0]
    if use.kind == "scale":
        candidates = [d for d in candidates if d in use.reduce_dims]
    for repeated in (False, True):
        for d in candidates:
            repeat = rows.shape[d] // count
            if (repeat > 1) != repeated:
                continue
            arrived = rows.movedim(d, 0).flatten(1).any(1) if rows.dim() > 1 else rows
            if not (arrived & ~mask.repeat_interleave(repeat)).any():
                return DatumAxis(d, True)
            if not (arrived & ~mask.repeat(repeat)).any():
                return DatumAxis(d, False)
    return None


def _place(use: Use, subset: Subset, key: tuple[str, int]) -> Place | None:
    """Where the use's entries lie in the subset; None where none of them does."""
    part, chosen = subset.parts[use.site], subset.chosen[use.site]
    if chosen is None:
        if use.indices is None:
            return Place(key, part)
        return Place(key, use.indices.reshape(-1) + part.start)
    entries = subset.layout.latents[use.site].size
    table = torch.full((entries,), -1, dtype=torch.long)
    table[chosen.cpu()] = torch.arange(part.start, part.stop)
    positions = table if use.indices is None else table[use.indices.reshape(-1).cpu()]
    inside = (positions >= 0).nonzero()[:, 0]
    if not len(inside):
        return None
    device = chosen.device if use.inputs is None else use.inputs.device
    return Place(key, positions[inside].to(device), inside.to(device))


def _rows(
    use: Use, axis: DatumAxis, gradient: Tensor | None, num_data: int, like: Tensor
) -> Tensor:
    """A gradient of z as (n, T, groups, out), or (n, m) for a scale."""
    if gradient is None:
        gradient = like.new_zeros(use.output_shape)
    gradient = gradient.to(_working(gradient.dtype))
    if use.kind == "scale":
        if use.inputs is not None:
            gradient = gradient * use.inputs
        rest = [d for d in range(gradient.dim()) if d != axis.dim]
        rows = axis.first(gradient, num_data)
        summed = [1] + [2 + i for i, d in enumerate(rest) if d in use.reduce_dims]
        return rows.sum(summed).reshape(num_data, -1)
    rows = axis.first(_as_rows(use, gradient), num_data)
    return rows.reshape(num_data, -1, use.groups, rows.shape[-1] // use.groups)


def _block(use: Use, axis: DatumAxis, stacked: Tensor, num_data: int, place: Place) -> Block:
    if use.kind == "scale":
        return Dense(Place(place.key, place.positions), place.take(stacked))
    if use.kind == "lookup":
        assert use.inputs is not None
        return _lookup(axis.first(use.inputs, num_data), stacked, use.shape, place)
    if use.inputs is None:
        return Product(place, None, stacked)
    inputs = use.inputs.to(_working(use.inputs.dtype))
    inputs = inputs[..., None, :] if use.unfold is None else use.unfold(inputs)
    inputs = axis.first(inputs, num_data).reshape(num_data, -1, *inputs.shape[-2:])
    return Product(place, inputs, stacked)


def _lookup(rows_of: Tensor, stacked: Tensor, shape: torch.Size, place: Place) -> Lookup:
    """Gradients of the same row in the same datum, added up."""
    num_rows, features = shape
    num_data = len(rows_of)
    rows_of = rows_of.reshape(num_data, -1)
    keys = torch.arange(num_data, device=rows_of.device)[:, None] * num_rows + rows_of
    unique, inverse = keys.reshape(-1).unique(return_inverse=True)
    flat = stacked.reshape(len(stacked), -1, features)
    sums = flat.new_zeros(len(stacked), len(unique), features).index_add(1, inverse, flat)
    return Lookup(place, unique // num_rows, unique % num_rows, sums, num_data, num_rows)

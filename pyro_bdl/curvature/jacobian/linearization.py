"""The linearization of a program over one batch of data, which gives columns of its Jacobian."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.affine_uses import AffineUse, UseRecorder
from pyro_bdl.curvature.jacobian.block_position import BlockPosition
from pyro_bdl.curvature.jacobian.datum_axes import (
    Alignment,
    DatumAxis,
    aligned_with,
    as_rows,
    datum_axes,
    levels_of,
    rounding_of,
    scales_by,
)
from pyro_bdl.curvature.jacobian.jacobian import Block, DenseBlock, Jacobian, ProductBlock, merged
from pyro_bdl.curvature.jacobian.other_latents import blocks_of_other_latents, is_shared
from pyro_bdl.curvature.jacobian.output_layers import IdentityBlock, SoftmaxBlock
from pyro_bdl.curvature.jacobian.use_blocks import (
    first_uses_of_entries,
    gradient_rows,
    lookup,
    position_of,
    repeats,
    working_dtype,
)
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import Run, leave_open, record
from pyro_bdl.utils.module_state import evaluation_mode, vmappable
from pyro_bdl.utils.random_state import fixed_normal

Outputs = Callable[[Run], Sequence[Tensor]]


class Linearization:
    """A run of the program on one batch at one value of the latents, with its graph.

    :param model: the program.
    :param subset: the latents of interest; the others count as constants.
    :param vector: the unconstrained vector (P,) of the latents.
    :param known: alignments found in earlier batches of the same program; filled here.
    :param training: run as in a training step: modules run in their own modes and update their
        buffers, and the latents stay functions of ``vector``. The outputs must be the same as in
        evaluation mode.
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
        training: bool = False,
    ) -> None:
        self.model, self.subset, self.vector = model, subset, vector.detach()
        self.args, self.kwargs, self.training = args, kwargs, training
        self.known = {} if known is None else known
        self.alignments: dict[Any, Alignment] = {}  # of this batch
        layout = subset.layout
        self.leaves = layout.unflatten(vector if training else self.vector)
        if not training:
            for name in subset.parts:
                self.leaves[name] = self.leaves[name].clone().requires_grad_()
        mode = nullcontext() if training else evaluation_mode(model, args)
        with torch.enable_grad(), mode, vmappable():
            values = layout.to_supports(self.leaves)
            seen = {n: v for n, v in values.items() if v is self.leaves[n] and n in subset.parts}
            with UseRecorder(seen) as operations:
                self.run: Run = record(model, values, args, kwargs, draw=leave_open)
        self.uses = operations.uses
        self.vector_products = operations.vector_products
        self.first_uses = first_uses_of_entries(self.uses)
        self.unfolded: dict[Any, Tensor] = {}
        self.unmatched = operations.unmatched | {
            use.site for use in self.uses if repeats(use.indices)
        }

    def gradient(self, value: Tensor, *, create_graph: bool = False) -> Tensor:
        """The gradient of a scalar in the subset, (p,); zero where it does not depend on it."""
        leaves = [self.leaves[name] for name in self.subset.parts]
        found = torch.autograd.grad(
            value, leaves, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        parts = []
        for gradient, leaf, kept in zip(found, leaves, self.subset.chosen.values(), strict=True):
            part = torch.zeros_like(leaf) if gradient is None else gradient
            part = part.reshape(-1)
            parts.append(part if kept is None else part[kept.to(part.device)])
        return torch.cat(parts)

    def pullback(self, outputs: Outputs, num_data: int, *, label: Any = None) -> "Pullback":
        """Return outputs of the run as functions of the subset, datum by datum.

        :param outputs: reads the outputs from a run; each has shape (n, ...), or any shape if n =
            1.
        :param num_data: n.
        :param label: a name of these outputs, to reuse their alignment in later batches.
        """
        return Pullback(self, outputs, num_data, label)


class Pullback:
    """Outputs of a linearization as functions of the subset, datum by datum."""

    def __init__(
        self, linearization: Linearization, outputs: Outputs, num_data: int, label: Any
    ) -> None:
        self.at, self.read, self.num_data = linearization, outputs, num_data
        self.outputs = list(outputs(linearization.run))
        kinds = tuple((use.site, use.kind, len(use.output_shape)) for use in linearization.uses)
        key = label, kinds
        if label is None or key not in linearization.alignments:
            known = linearization.known.get(key)
            if known is None or not self._holds(known):
                known = self._align()
            linearization.alignments[key] = known
            if label is not None and num_data > 1:
                linearization.known[key] = known
        self.alignment = linearization.alignments[key]

    def gradients(
        self, cotangents: Sequence[Tensor], inputs: Sequence[Any]
    ) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            self.outputs, list(inputs), list(cotangents), retain_graph=True, allow_unused=True
        )

    def jacobian(
        self,
        columns: Sequence[Sequence[Tensor]],
        arrived: Sequence[Sequence[Tensor | None]] | None = None,
    ) -> Jacobian:
        """Return the gradients of sum_j <column_kj, output_j> in the subset, for every datum.

        :param columns: K cotangents, each with a tensor for every output.
        :param arrived: the gradients of each column at the outputs of all uses, if known; by
            default they are back-propagated.
        """
        blocks = self._aligned_blocks(columns, self.alignment, arrived)
        blocks += blocks_of_other_latents(self, columns)
        return self._of_blocks(blocks, len(columns))

    def identity(self) -> Jacobian:
        """Return the Jacobian of all K outputs of a datum, with a column for each."""
        sizes = [output.numel() // self.num_data for output in self.outputs]
        uses = self._output_layer_uses()
        if uses and self._output_gradient_is(lambda noise: noise):
            (size,) = sizes
            like = self.outputs[0].detach()
            eye = torch.eye(size, dtype=working_dtype(like.dtype), device=like.device)
            eye = eye[:, None, None, None].expand(size, self.num_data, 1, 1, size)
            blocks: list[Block] = [
                IdentityBlock(*self._product(use, position), eye, use.shape)
                for use, position in uses
            ]
            return self._of_blocks(blocks, size)
        columns: list[list[Tensor]] = []
        for number, size in enumerate(sizes):
            for entry in range(size):
                column = [torch.zeros_like(output) for output in self.outputs]
                column[number].view(self.num_data, -1)[:, entry] = 1.0
                columns.append(column)
        return self.jacobian(columns)

    def softmax(self, weights: Tensor) -> Jacobian | None:
        """Return columns of a Categorical's Fisher information, if its logits are the outputs of
        one product.

        :param weights: weights of the data, (n,).
        :returns: None if the logits (n, K) are not the outputs of a product, up to a constant of
            each datum.
        """
        uses = self._output_layer_uses()
        if not uses:
            return None
        p = self.outputs[0].detach().softmax(-1)
        if not self._output_gradient_is(lambda noise: noise - p * noise.sum(-1, keepdim=True)):
            return None
        p = p.to(working_dtype(p.dtype))
        blocks: list[Block] = [
            SoftmaxBlock(
                *self._product(use, position), p[None, :, None, None], use.shape,
                weights.to(p)[:, None],
            )
            for use, position in uses
        ]  # fmt: skip
        return self._of_blocks(blocks, p.shape[-1])

    def _output_layer_uses(self) -> list[tuple[AffineUse, BlockPosition]]:
        """Return the uses of the output layer, if the only output is that of one product.

        Empty if the output depends on other uses too, or only some entries of a site are in the
        subset.
        """
        at, shape = self.at, self.outputs[0].shape
        reached = [i for i, axis in enumerate(self.alignment.axes) if axis is not None]
        uses = [at.uses[i] for i in reached]
        positions = [position_of(at.uses[i], at.subset, at.first_uses[i]) for i in reached]
        plain = (
            len(self.outputs) == 1
            and len(shape) == 2
            and not self.alignment.others
            and len({use.site for use in uses}) == len(uses)
            and all(use.edge == uses[0].edge and use.output_shape == shape for use in uses)
            and all(use.kind == "product" and use.to_rows is None for use in uses)
            and all(use.groups == 1 and use.indices is None for use in uses)
        )
        found = [(u, p) for u, p in zip(uses, positions, strict=True) if p and p.chosen is None]
        return found if plain and len(found) == len(uses) else []

    def _output_gradient_is(self, expected: Callable[[Tensor], Tensor]) -> bool:
        """Return whether back-propagated noise arrives at the product as expected."""
        (output,) = self.outputs
        edge = next(use.edge for use, _ in self._output_layer_uses())
        noise = fixed_normal(output, seed=1)
        (found,) = self.gradients([noise], [edge])
        slack = rounding_of(self.at.vector) * float(noise.abs().max()) * 10
        return found is not None and torch.allclose(found, expected(noise), rtol=0.0, atol=slack)

    def _product(
        self, use: AffineUse, position: BlockPosition
    ) -> tuple[BlockPosition, Callable[[], Tensor] | None]:
        source = partial(self._inputs, use, DatumAxis(0, True))
        return position, None if use.inputs is None else source

    def _of_blocks(self, blocks: list[Block], num_columns: int) -> Jacobian:
        like = self.at.vector.new_empty(0, dtype=working_dtype(self.at.vector.dtype))
        return Jacobian(blocks, num_columns, self.num_data, self.at.subset.size, like)

    def _aligned_blocks(
        self,
        columns: Sequence[Sequence[Tensor]],
        alignment: Alignment,
        arrived: Sequence[Sequence[Tensor | None]] | None = None,
    ) -> list[Block]:
        at = self.at
        which = [
            i
            for i, (use, axis) in enumerate(zip(at.uses, alignment.axes, strict=True))
            if axis is not None and use.site not in alignment.others
        ]
        edges = [at.uses[i].edge for i in which]
        pulled: list[Sequence[Tensor | None]] = []
        if arrived is not None:
            pulled = [[gradients[i] for i in which] for gradients in arrived]
        elif edges:
            pulled = [self.gradients(column, edges) for column in columns]
        by_site: dict[str, list[tuple[Block, Tensor | None]]] = {}
        stacks: dict[Any, Tensor] = {}  # shared by the weight and the bias of an operation
        for i, number in enumerate(which):
            use, axis = at.uses[number], alignment.axes[number]
            assert axis is not None
            position = position_of(use, at.subset, at.first_uses[number])
            if position is not None:
                key = (use.edge, axis, use.groups) if use.kind == "product" else i
                if key not in stacks:
                    found = [
                        gradient_rows(use, axis, g[i], self.num_data, at.vector) for g in pulled
                    ]
                    stacks[key] = found[0][None] if len(found) == 1 else torch.stack(found)
                block = self._block(use, axis, stacks[key], position)
                by_site.setdefault(use.site, []).append((block, use.indices))
        blocks: list[Block] = []
        for site, members in by_site.items():
            part = at.subset.parts[site]
            blocks += merged([block for block, _ in members], [own for _, own in members], part)
        return blocks

    def _block(
        self, use: AffineUse, axis: DatumAxis, stacked: Tensor, position: BlockPosition
    ) -> Block:
        if use.kind == "scale":
            return DenseBlock(replace(position, chosen=None), position.take(stacked))
        if use.kind == "lookup":
            assert use.inputs is not None
            return lookup(axis.first(use.inputs, self.num_data), stacked, use.shape, position)
        if use.inputs is None:
            return ProductBlock(position, None, stacked, use.shape)
        return ProductBlock(position, partial(self._inputs, use, axis), stacked, use.shape)

    def _inputs(self, use: AffineUse, axis: DatumAxis) -> Tensor:
        """Return a of a product as (n, T, groups, in); patches are kept for other columns."""
        kept = self.at.unfolded.get((use.edge, use.number, axis))
        if kept is not None:
            return kept
        assert use.inputs is not None
        inputs = use.inputs.to(working_dtype(use.inputs.dtype))
        inputs = inputs[..., None, :] if use.unfold is None else use.unfold(inputs)
        inputs = axis.first(inputs, self.num_data).flatten(1, -3)
        self.at.unfolded[use.edge, use.number, axis] = inputs
        return inputs

    # Assignment of rows to data

    def _align(self) -> Alignment:
        """Find the data axis of each use, by back-propagation of noise.

        Noise is back-propagated once as it is, and again with each datum's noise multiplied by its
        own power of two. A row of an operation's output belongs to a datum if its gradient is
        multiplied by that datum's factor; rows that several data reach belong to none. Scaling by
        powers of two is exact, and any two data have different powers in at least one pass. At the
        end the sums over the data are compared with autograd's gradients, which reveals uses that
        were not recorded.
        """
        at = self.at
        noise = [fixed_normal(output, seed) for seed, output in enumerate(self.outputs)]
        names = list(at.subset.parts)
        edges = [use.edge for use in at.uses]
        found = self.gradients(noise, [*edges, *(at.leaves[name] for name in names)])
        arrived, of_sites = found[: len(edges)], found[len(edges) :]
        candidates = [
            [] if g is None else datum_axes(use, self.num_data)
            for use, g in zip(at.uses, arrived, strict=True)
        ]
        for levels in levels_of(self.num_data, at.vector.device):
            if not edges:
                break
            scaled = self.gradients([n * aligned_with(levels, n) for n in noise], edges)
            for i, (use, before, after) in enumerate(zip(at.uses, arrived, scaled, strict=True)):
                if before is not None and after is not None:
                    pair = as_rows(use, before), as_rows(use, after)
                    candidates[i] = [a for a in candidates[i] if scales_by(*pair, a, levels)]
        axes = tuple(found[0] if found else None for found in candidates)
        used = list(zip(at.uses, axes, arrived, strict=True))
        lost = {use.site for use, axis, g in used if axis is None and g is not None}
        by_use = {use.site for use, axis, _ in used if axis is not None}
        others = tuple(
            name
            for name, gradient in zip(names, of_sites, strict=True)
            if gradient is not None and (name in at.unmatched or name in lost or name not in by_use)
        )
        wrong = self._incomplete(
            Alignment(axes, others, ()), noise, dict(zip(names, of_sites, strict=True))
        )
        others = tuple(name for name in names if name in wrong or name in others)
        return Alignment(axes, others, self._behind_shared_outputs(others))

    def _holds(self, alignment: Alignment) -> bool:
        """Return whether the data axes of an earlier batch are those of this one too.

        Rows may interact in one batch and not in another, and where all gradients of a batch are
        zero any axis has their scaling.
        """
        uses = [
            (use, axis)
            for use, axis in zip(self.at.uses, alignment.axes, strict=True)
            if use.site not in alignment.others
        ]
        if not uses or self.num_data == 1:
            return True
        edges = [use.edge for use, _ in uses]
        noise = [fixed_normal(output, seed) for seed, output in enumerate(self.outputs)]
        numbers = fixed_normal(noise[0].new_empty(self.num_data), len(noise))
        levels = torch.exp2((4.0 * numbers).round().clamp(-8.0, 8.0).float())
        arrived = self.gradients(noise, edges)
        scaled = self.gradients([n * aligned_with(levels, n) for n in noise], edges)
        for (use, axis), before, after in zip(uses, arrived, scaled, strict=True):
            if before is None or after is None or not before.any():
                continue
            if axis is None or axis not in datum_axes(use, self.num_data):
                return False
            if not scales_by(as_rows(use, before), as_rows(use, after), axis, levels):
                return False
        return True

    def _behind_shared_outputs(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the sites that only affect outputs common to all data."""
        own = [o for o in self.outputs if not is_shared(o, self.num_data) and o.requires_grad]
        if not own or not names:
            return tuple(names)
        leaves = [self.at.leaves[name] for name in names]
        found = torch.autograd.grad(
            own, leaves, [torch.ones_like(o) for o in own], retain_graph=True, allow_unused=True
        )
        return tuple(name for name, g in zip(names, found, strict=True) if g is None)

    def _incomplete(
        self, alignment: Alignment, noise: Sequence[Tensor], gradients: Mapping[str, Tensor | None]
    ) -> set[str]:
        """Return the sites whose gradients are not the sums of their uses' gradients."""
        subset, totals, bounds = self.at.subset, {}, {}
        for block in self._aligned_blocks([noise], alignment):
            site = block.position.key[0]
            if site not in totals:
                size = subset.parts[site].stop - subset.parts[site].start
                totals[site], bounds[site] = block.total().new_zeros(size), 0.0
            total = block.total().flatten()
            if not isinstance(block, DenseBlock):
                total = block.position.take(total)
            where = block.position.index_tensor(total.device) - subset.parts[site].start
            totals[site].index_add_(0, where, total)
            bounds[site] = bounds[site] + float(block.bound())
        wrong = set()
        for site, total in totals.items():
            gradient = gradients[site]
            expected = torch.zeros_like(total) if gradient is None else gradient.reshape(-1)
            chosen = subset.chosen[site]
            if gradient is not None and chosen is not None:
                expected = expected[chosen.to(expected.device)]
            slack = rounding_of(self.at.vector) * bounds[site]
            if not ((total - expected).abs() <= slack).all() and math.isfinite(slack):
                wrong.add(site)
        return wrong

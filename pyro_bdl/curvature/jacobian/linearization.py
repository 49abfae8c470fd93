"""The linearization of a program over one batch of data, and the blocks of its Jacobian that follow
from the uses of latents by single rows."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.affine_uses import AffineUse, UseRecorder
from pyro_bdl.curvature.jacobian.jacobian import (
    Block,
    BlockPosition,
    DenseBlock,
    IdentityBlock,
    Jacobian,
    LookupBlock,
    ProductBlock,
    SoftmaxBlock,
    added,
    merged,
    same_entries,
)
from pyro_bdl.distributions.parameters import base_distribution, parameters_of
from pyro_bdl.program.linear_ops.last_layer import Path
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import Run
from pyro_bdl.utils.autograd import passed_by, reaches
from pyro_bdl.utils.precision import rounds_to_tf32
from pyro_bdl.utils.random_state import fixed_normal


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class RecordedRows:
    """A run over n data with all uses of latents, datum by datum.

    ``mapped`` says whether one map ran all of them.

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
        self._recorders, self.mapped = recorders, recorders[0].mapped
        self.uses = recorders[0].uses
        self.num_operations = len(recorders[0].edges)
        self._unfolded: dict[int, Tensor] = {}
        firsts = _first_uses_of_entries(self.uses)
        self._positions = [
            _position(use, subset, first) for use, first in zip(self.uses, firsts, strict=True)
        ]

    @property
    def edges(self) -> dict[str, set[tuple[Any, int]]]:
        """The results z of operations in autograd's graph, by the site that they use."""
        found: dict[str, set[tuple[Any, int]]] = {}
        for recorder in self._recorders:
            for use in recorder.uses:
                edge = recorder.edges[use.op]
                if edge is not None:
                    found.setdefault(use.site, set()).add((edge.node, edge.output_nr))
        return found

    def path(self, place: tuple[str, str]) -> Path:
        """Return what a tensor is of the last operation's result z, see ``UseRecorder.paths``.

        :param place: its site and its name there.
        """
        found = {recorder.paths.get(place, Path.MIXED) for recorder in self._recorders}
        return found.pop() if len(found) == 1 else Path.MIXED

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
        if self.mapped:
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


class Linearization:
    """A run of a program on one batch at a point, with its graph.

    :param at: the point. ``leaves`` are the unconstrained latents, by site.
    :param rows: the run's uses of the latents, datum by datum; None if only the whole run is known.
    :param parameters: of observed sites, the tensors of their distributions in ``rows``, if these
        are not those of ``run``.
    :param by_row: of deterministic sites, whether they have a value for each row.
    :param reading: the run with the parameters that the program reads, where they are asked for (a
        ``ParameterReading``).
    :param run_at: the program on all rows at once, as a function of the leaves, where single rows
        were mapped.
    """

    def __init__(
        self,
        at: Any,
        batch: tuple[tuple, Mapping[str, Any]],
        run: Run,
        rows: RecordedRows | None,
        parameters: Mapping[str, dict[str, Tensor]] | None = None,
        by_row: Mapping[str, bool] | None = None,
        reading: Any = None,
        run_at: Callable[[Mapping[str, Tensor]], Run] | None = None,
    ) -> None:
        self.model, self.subset, self.vector = at.model, at.subset, at.vector
        self.leaves: Mapping[str, Tensor] = at.leaves
        self.differentiable: bool = at.differentiable
        self.args, self.kwargs = batch
        self.run, self.rows, self.reading = run, rows, reading
        self._parameters = parameters or {}
        self.by_row = by_row or {}
        self.run_at = run_at
        self._origins = at.origins

    def parameters(self, name: str) -> dict[str, Tensor]:
        """The tensors of an observed site's distribution, by name."""
        if name in self._parameters:
            return self._parameters[name]
        return parameters_of(base_distribution(self.run.observed[name].distribution))

    def origins(self) -> dict[str, list[Tensor]]:
        """``ProgramAtPoint.origins`` of the batch."""
        return self._origins((self.args, self.kwargs))

    def gradient(self, value: Tensor, *, create_graph: bool = False) -> Tensor:
        """The gradient of a scalar in the subset, (p,); zero where it does not depend on it."""
        leaves = [self.leaves[name] for name in self.subset.parts]
        graph = create_graph or self.differentiable
        found = torch.autograd.grad(
            value, leaves, retain_graph=True, create_graph=graph, materialize_grads=True
        )
        return self.subset.of_sites(found)


@dataclass
class VJP:
    """Outputs of a linearization as functions of the subset, datum by datum: their Jacobian.

    :param outputs: each of shape (n, ...), or of any shape if n = 1.
    :param num_data: n.
    :param of: the site of the only output, and its name there: that of a parameter, or "value".
    """

    at: Linearization
    outputs: Sequence[Tensor]
    num_data: int
    of: tuple[str, str] = ("", "")

    @property
    def rows(self) -> RecordedRows | None:
        """The uses of single rows, where these are the data."""
        rows = self.at.rows
        return rows if rows is not None and rows.num_data == self.num_data else None

    def jacobian(self, columns: Sequence[Sequence[Tensor]]) -> Jacobian:
        """Return the gradients of sum_j <column_kj, output_j> in the subset, for every datum.

        :param columns: K cotangents, each with a tensor for every output.
        """
        blocks = [] if self.rows is None else self.rows.blocks(self.outputs, columns)
        leaves = [self.at.leaves[name] for name in self.at.subset.parts]
        if not blocks and any(reaches(output, leaves) for output in self.outputs):
            blocks = self._backward(columns)  # the outputs are not those of single rows
        return self._of_blocks(blocks, len(columns))

    @torch.enable_grad()  # outputs are indexed here
    def _backward(self, columns: Sequence[Sequence[Tensor]]) -> list[Block]:
        """Blocks of rows by one backward pass for each datum and column."""
        at, rows = self.at, []
        for column in columns:
            for datum in range(self.num_data):
                total = at.vector.new_zeros(())
                for cotangent, output in zip(column, self.outputs, strict=True):
                    whole = self.num_data == 1
                    c, out = (cotangent, output) if whole else (cotangent[datum], output[datum])
                    total = total + (c * out).sum()
                rows.append(
                    at.gradient(total) if total.requires_grad else at.subset.take(0 * at.vector)
                )
        values = torch.stack(rows).unflatten(0, (len(columns), self.num_data))
        values = values.to(working_dtype(values.dtype))
        return [
            DenseBlock(BlockPosition((name, -1), part), values[..., part])
            for name, part in at.subset.parts.items()
        ]

    def identity(self) -> Jacobian:
        """Return the Jacobian of all K outputs of a datum, with a column for each."""
        sizes = [output.numel() // self.num_data for output in self.outputs]
        uses = self._output_layer(Path.SAME, Path.SHIFTED)
        if uses:
            (size,) = sizes
            like = self.outputs[0].detach()
            eye = torch.eye(size, dtype=working_dtype(like.dtype), device=like.device)
            eye = eye[:, None, None, None].expand(size, self.num_data, 1, 1, size)
            blocks: list[Block] = [
                IdentityBlock(position, source, eye, shape) for position, source, shape in uses
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
        uses = self._output_layer(Path.SAME, Path.SHIFTED, Path.LOGITS)
        if not uses:
            return None
        p = self.outputs[0].detach().softmax(-1)
        p = p.to(working_dtype(p.dtype))
        blocks: list[Block] = [
            SoftmaxBlock(position, source, p[None, :, None, None], shape, weights.to(p)[:, None])
            for position, source, shape in uses
        ]
        return self._of_blocks(blocks, p.shape[-1])

    def _output_layer(self, *paths: Path) -> list[Any]:
        """Return the products z whose weights and biases are the whole subset's uses, if the only
        output has one of these paths from z, by the program's operations."""
        rows = self.rows
        if rows is None or rows.num_operations != 1 or len(self.outputs) != 1:
            return []
        (output,), leaves = self.outputs, [self.at.leaves[name] for name in self.at.subset.parts]
        if rows.path(self.of) not in paths or output.dim() != 2 or not reaches(output, leaves):
            return []
        if (
            len({use.site for use in rows.uses}) < len(rows.uses)
            or any(use.kind != "product" or use.to_rows is not None for use in rows.uses)
            or any(use.groups > 1 or use.indices is not None for use in rows.uses)
            or any(use.shape[1] != output.shape[1] for use in rows.uses)  # one position
            or any(self.at.subset.chosen[use.site] is not None for use in rows.uses)
        ):
            return []
        return [rows.product(place) for place in range(len(rows.uses))]

    def _of_blocks(self, blocks: list[Block], num_columns: int) -> Jacobian:
        vector = self.at.vector
        like = vector.new_empty(0, dtype=working_dtype(vector.dtype))
        return Jacobian(blocks, num_columns, self.num_data, self.at.subset.size, like)


def unseen_uses(
    rows: RecordedRows, outputs: Sequence[Tensor], leaves: Mapping[str, Tensor]
) -> set[str]:
    """Return the sites that the outputs depend on otherwise than by their recorded uses.

    Autograd's graph has a way from a site to an output around the results of its uses, or the
    site's gradient is not the sum of theirs, where an unseen use is in front of a recorded one.

    :param outputs: of the rows.
    :param leaves: the sites of the subset.
    """
    subset = rows.subset
    outputs = [output for output in outputs if output.requires_grad]
    if not outputs:
        return set()
    noise = [fixed_normal(output, seed) for seed, output in enumerate(outputs)]
    found = torch.autograd.grad(
        outputs, list(leaves.values()), noise, retain_graph=True, materialize_grads=True
    )
    count, like = rows.num_data, found[0].new_empty(0, dtype=working_dtype(found[0].dtype))
    jacobian = Jacobian(rows.blocks(outputs, [noise]), 1, count, subset.size, like)
    (total,), expected = jacobian.combined(like.new_ones(1, count, 1)), subset.of_sites(found)
    rounding = rounding_of(expected)
    wrong = passed_by(outputs, leaves, rows.edges)
    least = 0.1 * rounding * float(expected.abs().max())
    for site, part in subset.parts.items():
        slack = max(least, min(100 * rounding, 0.1) * float(expected[part].abs().max()))
        if not ((total[part] - expected[part]).abs() <= slack).all() and math.isfinite(slack):
            wrong.add(site)
    return wrong


def rounding_of(like: Tensor) -> float:
    """Return the possible difference of equal numbers by rounding, relative to their terms'
    sizes."""
    if like.dtype == torch.float64:
        return 1e-9
    if like.dtype != torch.float32:
        return 3e-2
    return 3e-3 if rounds_to_tf32(like) else 1e-5

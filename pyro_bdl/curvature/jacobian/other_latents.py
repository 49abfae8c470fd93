"""Rows of a Jacobian in latents outside linear operations, such as a noise scale."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.block_position import BlockPosition
from pyro_bdl.curvature.jacobian.datum_axes import aligned_with
from pyro_bdl.curvature.jacobian.jacobian import Block, DenseBlock
from pyro_bdl.curvature.jacobian.use_blocks import working_dtype
from pyro_bdl.program.trace import leave_open, record
from pyro_bdl.utils.module_state import evaluation_mode, vmappable

if TYPE_CHECKING:
    from pyro_bdl.curvature.jacobian.linearization import Pullback

Columns = Sequence[Sequence[Tensor]]
Names = Sequence[str]


@torch.enable_grad()  # outputs are indexed here
def blocks_of_other_latents(pullback: "Pullback", columns: Columns) -> list[Block]:
    """Return blocks of the sites whose gradients do not follow from affine uses.

    :param columns: K cotangents, each with a tensor for every output.
    """
    passes = pullback.num_data * len(columns)  # the number of backward passes that always suffices
    shared: Names = pullback.alignment.shared
    if sum(output.numel() for _, output in _shared_outputs(pullback)) > passes:
        shared = ()
    rest = [name for name in pullback.alignment.others if name not in shared]
    blocks: list[Block] = []
    if shared:
        blocks += _as_blocks(pullback, shared, _shared_rows(pullback, columns, shared))
    if rest:
        rows = None
        if sum(_sizes(pullback, rest)) <= passes:
            rows = _forward_rows(pullback, columns, rest)
        if rows is None:
            rows = _backward_rows(pullback, columns, rest)
        blocks += _as_blocks(pullback, rest, rows)
    return blocks


def _sizes(pullback: "Pullback", names: Names) -> list[int]:
    parts = [pullback.at.subset.parts[name] for name in names]
    return [part.stop - part.start for part in parts]


def _as_blocks(pullback: "Pullback", names: Names, rows: Tensor) -> list[Block]:
    rows = rows.to(working_dtype(rows.dtype))
    return [
        DenseBlock(BlockPosition((name, -1), pullback.at.subset.parts[name]), values)
        for name, values in zip(names, rows.split(_sizes(pullback, names), -1), strict=True)
    ]


def _chosen(pullback: "Pullback", names: Names, gradients: Sequence[Tensor | None]) -> Tensor:
    """Return the gradients in some sites, flattened, for the entries in the subset, (p,)."""
    flat = []
    for name, gradient in zip(names, gradients, strict=True):
        leaf, chosen = pullback.at.leaves[name], pullback.at.subset.chosen[name]
        values = (torch.zeros_like(leaf) if gradient is None else gradient).reshape(-1)
        flat.append(values if chosen is None else values[chosen.to(values.device)])
    return torch.cat(flat)


# ------------------------------------------------------------------------------- shared outputs


def is_shared(output: Tensor, num_data: int) -> bool:
    """Return True if an output (n, ...) is one tensor for all data, expanded."""
    return num_data == 1 or output.stride(0) == 0


def _shared_outputs(pullback: "Pullback") -> list[tuple[int, Tensor]]:
    """Return the positions and values of shared outputs, with expanded dimensions reduced to
    one."""
    found = []
    for number, output in enumerate(pullback.outputs):
        if is_shared(output, pullback.num_data) and output.requires_grad:
            for dim, stride in enumerate(output.stride()):
                output = output.narrow(dim, 0, 1) if stride == 0 else output
            found.append((number, output))
    return found


def _shared_rows(pullback: "Pullback", columns: Columns, names: Names) -> Tensor:
    """Return rows (K, n, p) by one small backward pass for each output number that all data
    share."""
    leaves = [pullback.at.leaves[name] for name in names]
    rows = pullback.at.vector.new_zeros(())
    for number, output in _shared_outputs(pullback):
        strides = pullback.outputs[number].stride()
        expanded = [
            d for d, stride in enumerate(strides) if not stride and (d or pullback.num_data == 1)
        ]
        jacobian = [
            _chosen(
                pullback,
                names,
                torch.autograd.grad(entry, leaves, retain_graph=True, allow_unused=True),
            )
            for entry in output.reshape(-1)
        ]
        cotangents = torch.stack([column[number] for column in columns])
        cotangents = cotangents.sum([d + 1 for d in expanded]) if expanded else cotangents
        cotangents = cotangents.reshape(len(columns), pullback.num_data, -1)
        rows = rows + cotangents @ torch.stack(jacobian)
    return rows


# ------------------------------------------------------------------------------- whole programs


def _forward_rows(pullback: "Pullback", columns: Columns, names: Names) -> Tensor | None:
    """Return rows by one forward derivative for each latent number.

    :returns: (K, n, p); None if an operator has no forward derivative.
    """
    at, layout = pullback.at, pullback.at.subset.layout
    parts = [at.subset.parts[name] for name in names]
    where = torch.cat([torch.arange(part.start, part.stop, device="cpu") for part in parts])
    if at.subset.indices is not None:
        where = at.subset.indices.cpu()[where]

    def outputs(vector: Tensor) -> tuple[Tensor, ...]:
        values = {**at.run.subsamples, **layout.to_supports(layout.unflatten(vector))}
        run = record(at.model, values, at.args, at.kwargs, draw=leave_open)
        return tuple(pullback.read(run))

    rows = []
    try:
        with evaluation_mode(at.model), vmappable():
            for position in where.tolist():
                tangent = torch.zeros_like(at.vector)
                tangent[position] = 1.0
                moved = torch.func.jvp(outputs, (at.vector,), (tangent,))[1]
                rows.append([_contract(pullback, column, moved) for column in columns])
    except (RuntimeError, NotImplementedError):
        return None
    return torch.stack([torch.stack(row) for row in rows], -1)


def _contract(pullback: "Pullback", column: Sequence[Tensor], moved: Sequence[Tensor]) -> Tensor:
    """Return <column, moved> for every datum, (n,)."""
    n = pullback.num_data
    terms = [(c * m).reshape(n, -1).sum(-1) for c, m in zip(column, moved, strict=True)]
    return torch.stack(terms).sum(0)


def _backward_rows(pullback: "Pullback", columns: Columns, names: Names) -> Tensor:
    """Return rows (K, n, p) by one backward pass for each datum and column."""
    leaves = [pullback.at.leaves[name] for name in names]
    data = torch.arange(pullback.num_data, device=pullback.at.vector.device)
    rows = []
    for column in columns:
        for datum in data:
            only = [c * aligned_with(data == datum, c) for c in column]
            rows.append(_chosen(pullback, names, pullback.gradients(only, leaves)))
    return torch.stack(rows).unflatten(0, (len(columns), pullback.num_data))

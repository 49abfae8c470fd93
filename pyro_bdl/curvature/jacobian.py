"""Jacobians of a batch in the latents, kept as the factors that back-propagation gives.

A ``Jacobian`` holds K columns of gradients for each of n data. Its blocks cover disjoint parts of
the latents and never form rows of length P unless asked to: a product z_t = W a_t has the gradient
sum_t g_t a_t', and squares, weighted inner products and Kronecker factors follow from (a, g).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Positions = slice | Tensor


@dataclass
class Place:
    """Where a block's entries lie.

    :param key: names the block: the site, and which use of it.
    :param positions: in the vector of the subset, one for each chosen entry.
    :param chosen: which of the block's flattened entries are in the subset; None: all.
    """

    key: tuple[str, int]
    positions: Positions
    chosen: Tensor | None = None

    def take(self, entries: Tensor) -> Tensor:
        """Entries (..., m) of the whole block that are in the subset."""
        return entries if self.chosen is None else entries[..., self.chosen]

    def spread(self, vectors: Tensor, shape: torch.Size) -> Tensor:
        """The subset's values (..., p) as all of this block's entries (..., *shape), zeros at
        those that are not in the subset."""
        values = vectors[..., self.positions]
        if self.chosen is not None:
            whole = values.new_zeros(*values.shape[:-1], shape.numel())
            whole[..., self.chosen] = values
            values = whole
        return values.reshape(*values.shape[:-1], *shape)

    @property
    def size(self) -> int:
        if isinstance(self.positions, slice):
            return self.positions.stop - self.positions.start
        return len(self.positions)

    def numbers(self, device: torch.device) -> Tensor:
        """The positions as integers (m,)."""
        if isinstance(self.positions, slice):
            return torch.arange(self.positions.start, self.positions.stop, device=device)
        return self.positions.to(device)


@dataclass
class Product:
    """Gradients sum_t g_t a_t' in a weight (groups, out, in).

    :param inputs: a, (n, T, groups, in); None: ones, with in = 1 (a bias).
    :param gradients: g, (K, n, T, groups, out).
    """

    place: Place
    inputs: Tensor | None
    gradients: Tensor

    @property
    def shape(self) -> torch.Size:
        into = 1 if self.inputs is None else self.inputs.shape[-1]
        return torch.Size((*self.gradients.shape[-2:], into))

    def entries(self) -> Tensor:
        """Gradients in all entries of the weight, (K, n, groups, out, in)."""
        g = self.gradients
        if self.inputs is None:
            return g.sum(2)[..., None]
        if g.shape[2] == 1:
            return g[:, :, 0, :, :, None] * self.inputs[:, 0, :, None, :]
        return torch.matmul(g.permute(0, 1, 3, 4, 2), self.inputs.transpose(1, 2))

    def rows(self) -> Tensor:
        """Gradients in the chosen entries, (K, n, m)."""
        chosen, g = self.place.chosen, self.gradients
        if chosen is None:
            return self.entries().flatten(2)
        _, out, into = self.shape
        group, o, i = chosen // (out * into), chosen // into % out, chosen % into
        if self.inputs is None:
            return g[..., group, o].sum(2)
        rows = g.new_zeros(*g.shape[:2], len(chosen))
        for t in range(g.shape[2]):
            rows += g[:, :, t, group, o] * self.inputs[:, t, group, i]
        return rows

    def squares(self) -> Tensor:
        """Sums over columns and data of the squared gradients, (groups, out, in)."""
        if self.gradients.shape[2] == 1 and self.inputs is not None:
            squares = self.gradients[:, :, 0].square().sum(0)  # (n, groups, out)
            return torch.einsum("ngo,ngi->goi", squares, self.inputs[:, 0].square())
        return self.entries().square_().sum((0, 1))

    def gram(self, weights: Tensor) -> Tensor:
        """Inner products of the columns weighted by (groups, out, in): (n, K, K) of
        sum_e w_e G_ke G_le."""
        g = self.gradients
        if g.shape[2] == 1 and self.inputs is not None:
            scaled = torch.einsum("ngi,goi->ngo", self.inputs[:, 0].square(), weights)
            g = g[:, :, 0].permute(1, 0, 2, 3).flatten(2)
            return torch.matmul(g * scaled.flatten(1)[:, None], g.mT)
        rows = self.entries().flatten(2).transpose(0, 1)
        return torch.matmul(rows * weights.reshape(-1), rows.mT)

    def apply(self, weight: Tensor) -> Tensor:
        """Inner products of the gradients with weights (S, groups, out, in): (S, n, K)."""
        g = self.gradients
        if self.inputs is None:
            return torch.einsum("kntgo,sgo->snk", g, weight[..., 0])
        outputs = torch.einsum("ntgi,sgoi->sntgo", self.inputs, weight)
        return torch.einsum("kntgo,sntgo->snk", g, outputs)

    def pull(self, values: Tensor) -> Tensor:
        """Sums over data and columns of values (S, n, K) times gradients: (S, *shape)."""
        g = torch.einsum("snk,kntgo->sntgo", values, self.gradients)
        if self.inputs is None:
            return g.sum((1, 2))[..., None]
        return torch.einsum("sntgo,ntgi->sgoi", g, self.inputs)

    def rotated(self, inputs: Tensor | None, outputs: Tensor | None) -> "Product":
        """The gradients in other bases: g Q_out and a Q_in, (groups, dim, dim) each."""
        g, a = self.gradients, self.inputs
        if outputs is not None:
            g = torch.einsum("kntgo,gop->kntgp", g, outputs)
        if inputs is not None and a is not None:
            a = torch.einsum("ntgi,gij->ntgj", a, inputs)
        return replace(self, gradients=g, inputs=a)


@dataclass
class Lookup:
    """Gradients g_u in rows v_u of a table (rows, features), each of one datum.

    :param data: which datum u belongs to, (U,).
    :param rows_of: v_u, (U,); no two entries of a datum share a row.
    :param gradients: (K, U, features).
    """

    place: Place
    data: Tensor
    rows_of: Tensor
    gradients: Tensor
    num_data: int
    num_rows: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((1, self.num_rows, self.gradients.shape[-1]))

    def rows(self) -> Tensor:
        columns, _, features = self.gradients.shape
        whole = self.gradients.new_zeros(columns, self.num_data, self.num_rows, features)
        whole[:, self.data, self.rows_of] = self.gradients
        return self.place.take(whole.flatten(2))

    def squares(self) -> Tensor:
        sums = self.gradients.new_zeros(self.num_rows, self.gradients.shape[-1])
        return sums.index_add(0, self.rows_of, self.gradients.square().sum(0))[None]

    def gram(self, weights: Tensor) -> Tensor:
        g = self.gradients.transpose(0, 1)
        products = torch.matmul(g * weights[0][self.rows_of][:, None], g.mT)
        sums = g.new_zeros(self.num_data, g.shape[1], g.shape[1])
        return sums.index_add(0, self.data, products)

    def apply(self, weight: Tensor) -> Tensor:
        values = torch.einsum("kud,sud->suk", self.gradients, weight[:, 0, self.rows_of])
        sums = values.new_zeros(len(weight), self.num_data, values.shape[-1])
        return sums.index_add(1, self.data, values)

    def pull(self, values: Tensor) -> Tensor:
        sums = torch.einsum("suk,kud->sud", values[:, self.data], self.gradients)
        result = sums.new_zeros(len(values), self.num_rows, sums.shape[-1])
        return result.index_add(1, self.rows_of, sums)[:, None]

    def rotated(self, inputs: Tensor | None, outputs: Tensor | None) -> "Lookup":
        if outputs is None:
            return self
        return replace(self, gradients=torch.matmul(self.gradients, outputs[0]))


@dataclass
class Dense:
    """Gradients as rows.

    :param values: (K, n, m).
    """

    place: Place
    values: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape[-1:]

    def rows(self) -> Tensor:
        return self.values

    def squares(self) -> Tensor:
        return self.values.square().sum((0, 1))

    def gram(self, weights: Tensor) -> Tensor:
        rows = self.values.transpose(0, 1)
        return torch.matmul(rows * weights, rows.mT)

    def apply(self, weight: Tensor) -> Tensor:
        return torch.einsum("knm,sm->snk", self.values, weight)

    def pull(self, values: Tensor) -> Tensor:
        return torch.einsum("snk,knm->sm", values, self.values)


Block = Product | Lookup | Dense


@dataclass
class Jacobian:
    """K columns of gradients for n data in p latents: blocks over disjoint parts of the p.

    What no block covers has gradient zero.
    """

    blocks: list[Block]
    num_columns: int
    num_data: int
    size: int  # p
    like: Tensor

    def rows(self) -> Tensor:
        """All of it as a tensor (K, n, p)."""
        result = self.like.new_zeros(self.num_columns, self.num_data, self.size)
        for block in self.blocks:
            result[..., block.place.positions] = block.rows()
        return result

    def joint_zeros(self) -> Tensor:
        total = self.num_data * self.num_columns
        return self.like.new_zeros(total, total)

    def apply(self, vectors: Tensor) -> Tensor:
        """J v for vectors (S, p): (S, n, K)."""
        result = self.like.new_zeros(len(vectors), self.num_data, self.num_columns)
        for block in self.blocks:
            result += block.apply(block.place.spread(vectors, block.shape))
        return result

    def pull(self, values: Tensor) -> Tensor:
        """J' v for values (S, n, K): (S, p)."""
        result = self.like.new_zeros(len(values), self.size)
        for block in self.blocks:
            entries = block.pull(values).flatten(1)
            if not isinstance(block, Dense):
                entries = block.place.take(entries)
            result[:, block.place.positions] = entries
        return result

    def gram(self, weights: Tensor) -> Tensor:
        """Inner products of a datum's columns weighted by (p,): (n, K, K)."""
        result = self.like.new_zeros(self.num_data, self.num_columns, self.num_columns)
        for block in self.blocks:
            result += block.gram(block.place.spread(weights, block.shape))
        return result


def merged(blocks: Sequence[Block], entries: Sequence[Tensor | None]) -> list[Block]:
    """The blocks of one site with shared parts made one.

    Uses of the very same entries (tied weights) are positions of one product; uses that overlap
    otherwise are added as rows.

    :param entries: for each block which entries of the site its own are; None: all, in order.
    """
    groups: list[tuple[list[Any], Tensor | None]] = []
    for block, own in zip(blocks, entries, strict=True):
        for members, theirs in groups:
            same = (own is None and theirs is None) or (
                own is not None and theirs is not None and torch.equal(own, theirs)
            )
            alike = isinstance(block, Product) and isinstance(members[0], Product)
            if same and alike and block.shape == members[0].shape:
                members.append(block)
                break
        else:
            groups.append(([block], own))
    joined = [_joined(members) for members, _ in groups]
    if len(joined) > 1 and _overlap([own for _, own in groups]):
        return [_added(joined)]
    return joined


def _joined(members: list[Any]) -> Any:
    if len(members) == 1:
        return members[0]
    inputs = None
    if members[0].inputs is not None:
        inputs = torch.cat([block.inputs for block in members], 1)
    gradients = torch.cat([block.gradients for block in members], 2)
    return replace(members[0], inputs=inputs, gradients=gradients)


def _overlap(entries: list[Tensor | None]) -> bool:
    if any(own is None for own in entries):
        return True
    numbers = torch.cat([own.reshape(-1) for own in entries if own is not None])
    return len(numbers.unique()) < len(numbers)


def _added(blocks: list[Block]) -> Dense:
    first = blocks[0].rows()
    positions = [block.place.numbers(first.device) for block in blocks]
    union, inverse = torch.cat(positions).unique(return_inverse=True)
    values = first.new_zeros(*first.shape[:2], len(union))
    for block, where in zip(blocks, inverse.split([len(p) for p in positions]), strict=True):
        values.index_add_(2, where, block.rows())
    return Dense(Place(blocks[0].place.key, union), values)


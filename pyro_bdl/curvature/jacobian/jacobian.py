"""Jacobians of a batch in the latents, stored as the factors from back-propagation.

A ``Jacobian`` holds K columns of gradients for each of n data. Its blocks cover disjoint subsets of
the latents and do not form rows of length P unless requested. A product z_t = W a_t has the
gradient sum_t g_t a_t', and squares, weighted inner products and Kronecker factors follow from (a,
g).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.block_position import BlockPosition


@dataclass
class ProductBlock:
    """Gradients sum_t g_t a_t' in a weight (groups, out, in).

    :param source: a function that returns a, (n, T, groups, in); None: ones, with in = 1 (a bias).
    :param gradients: g, (K, n, T, groups, out).
    :param shape: of the weight.
    """

    position: BlockPosition
    source: Callable[[], Tensor] | None
    gradients: Tensor
    shape: torch.Size

    @property
    def inputs(self) -> Tensor | None:
        return None if self.source is None else self.source()

    def entries(self) -> Tensor:
        """Gradients in all entries of the weight, (K, n, groups, out, in)."""
        g, a = self.gradients, self.inputs
        if a is None:
            return g.sum(2)[..., None]
        if g.shape[2] == 1:
            return g[:, :, 0, :, :, None] * a[:, 0, :, None, :]
        return torch.matmul(g.permute(0, 1, 3, 4, 2), a.transpose(1, 2))

    def rows(self) -> Tensor:
        """Gradients in the chosen entries, (K, n, m)."""
        chosen, g = self.position.chosen, self.gradients
        if chosen is None:
            return self.entries().flatten(2)
        _, out, into = self.shape
        group, o, i = chosen // (out * into), chosen // into % out, chosen % into
        a = self.inputs
        if a is None:
            return g[..., group, o].sum(2)
        rows = g.new_zeros(*g.shape[:2], len(chosen))
        for t in range(g.shape[2]):
            rows += g[:, :, t, group, o] * a[:, t, group, i]
        return rows

    def squares(self) -> Tensor:
        """Sums over columns and data of the squared gradients, (groups, out, in)."""
        if self.gradients.shape[2] == 1 and self.source is not None:
            squares = self.gradients[:, :, 0].square().sum(0)  # (n, groups, out)
            return torch.einsum("ngo,ngi->goi", squares, self.source()[:, 0].square())
        return self.entries().square_().sum((0, 1))

    def gram(self, weights: Tensor | None = None) -> Tensor:
        """Return sum_e w_e G_ke G_le for each datum, (n, K, K).

        :param weights: w, (groups, out, in); None: ones.
        """
        if self.single:
            g = self.gradients[:, :, 0].permute(1, 0, 2, 3).flatten(2)
            scaled = self.input_squares(weights).expand_as(self.gradients[0, :, 0])
            return torch.matmul(g * scaled.flatten(1)[:, None], g.mT)
        rows = self.entries().flatten(2).transpose(0, 1)
        return torch.matmul(weighted(rows, weights), rows.mT)

    def norms(self, weights: Tensor | None = None) -> Tensor:
        """The diagonals of ``gram``, (n, K)."""
        if self.single:
            squares = self.gradients[:, :, 0].square()
            return (squares * self.input_squares(weights)).sum((2, 3)).mT
        return weighted(self.entries().flatten(2).square(), weights).sum(2).mT

    @property
    def single(self) -> bool:
        """True if each datum has a single position: its gradient is then one product g a'."""
        return self.gradients.shape[2] == 1 and self.source is not None

    def input_squares(self, weights: Tensor | None) -> Tensor:
        """Return sum_i w_oi a_i^2 at single positions, (n, groups, out) or (n, groups, 1)."""
        assert self.source is not None
        squares = self.source()[:, 0].square()
        if weights is None:
            return squares.sum(2, keepdim=True)
        return torch.einsum("ngi,goi->ngo", squares, weights)

    def apply(self, weight: Tensor) -> Tensor:
        """Inner products of the gradients with weights (S, groups, out, in): (S, n, K)."""
        g = self.gradients
        if g.shape[2] > 1:
            return torch.einsum("knm,sm->snk", self.entries().flatten(2), weight.flatten(1))
        if self.source is None:
            return torch.einsum("kntgo,sgo->snk", g, weight[..., 0])
        outputs = torch.einsum("ngi,sgoi->sngo", self.source()[:, 0], weight)
        return torch.einsum("kngo,sngo->snk", g[:, :, 0], outputs)

    def combined(self, weights: Tensor) -> Tensor:
        """Sums of the gradients with weights (S, n, K): (S, groups, out, in)."""
        a, found = self.inputs, []
        for weight in weights:
            g = torch.einsum("nk,kntgo->ntgo", weight, self.gradients)
            found.append(
                g.sum((0, 1))[..., None] if a is None else torch.einsum("ntgo,ntgi->goi", g, a)
            )
        return torch.stack(found)

    def double(self) -> "ProductBlock":
        """Return the gradients in float64."""
        given = self.source
        source = None if given is None else cache(lambda: given().double())
        return replace(self, source=source, gradients=self.gradients.double())

    def total(self) -> Tensor:
        """Sums over columns and data of the gradients, (groups, out, in)."""
        g, a = self.gradients.sum(0), self.inputs
        return g.sum((0, 1))[..., None] if a is None else torch.einsum("ntgo,ntgi->goi", g, a)

    def bound(self) -> Tensor:
        """Return a bound on the entries of ``total``, without cancellation in the sums."""
        a = self.inputs
        size = self.gradients[0, ..., 0].numel() if a is None else a.square().sum()
        return (self.gradients.sum(0).square().sum() * size).sqrt()

    def rotated(self, inputs: Tensor | None, outputs: Tensor | None) -> "ProductBlock":
        """Return the gradients in other bases: g Q_out and a Q_in, (groups, dim, dim) each."""
        g, source = self.gradients, self.source
        if outputs is not None:
            g = torch.einsum("kntgo,gop->kntgp", g, outputs)
        if inputs is not None and source is not None:
            given = source
            source = cache(lambda: torch.einsum("ntgi,gij->ntgj", given(), inputs))
        return replace(self, gradients=g, source=source)

    def split_inputs(self, basis: Tensor) -> tuple["ProductBlock", "ProductBlock"]:
        """Split the gradients by orthonormal directions of the inputs.

        :param basis: the directions, (groups, in, r).
        :returns: the component along them, in their coordinates, and the component orthogonal to
            them, in the weight's coordinates.
        """
        given = self.source
        assert given is not None
        inside = cache(lambda: torch.einsum("ntgi,gij->ntgj", given(), basis))
        rest = cache(lambda: given() - torch.einsum("ntgj,gij->ntgi", inside(), basis))
        return replace(self, source=inside), replace(self, source=rest)

    def split_outputs(self, basis: Tensor) -> tuple["ProductBlock", "ProductBlock"]:
        """Split the gradients by directions of the outputs (groups, out, s), as in
        ``split_inputs``."""
        inside = torch.einsum("kntgo,gop->kntgp", self.gradients, basis)
        rest = self.gradients - torch.einsum("kntgp,gop->kntgo", inside, basis)
        return replace(self, gradients=inside), replace(self, gradients=rest)


@dataclass
class LookupBlock:
    """Gradients g_u in rows v_u of a table (rows, features); each belongs to one datum.

    :param data: the datum of each u, (U,).
    :param table_rows: v_u, (U,); no two entries of a datum share a row.
    :param gradients: (K, U, features).
    """

    position: BlockPosition
    data: Tensor
    table_rows: Tensor
    gradients: Tensor
    num_data: int
    num_rows: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((1, self.num_rows, self.gradients.shape[-1]))

    def rows(self) -> Tensor:
        columns, _, features = self.gradients.shape
        whole = self.gradients.new_zeros(columns, self.num_data, self.num_rows, features)
        whole[:, self.data, self.table_rows] = self.gradients
        return self.position.take(whole.flatten(2))

    def squares(self) -> Tensor:
        sums = self.gradients.new_zeros(self.num_rows, self.gradients.shape[-1])
        return sums.index_add(0, self.table_rows, self.gradients.square().sum(0))[None]

    def gram(self, weights: Tensor | None = None) -> Tensor:
        g = self.gradients.transpose(0, 1)
        products = torch.matmul(self._weighted(g, weights), g.mT)
        sums = g.new_zeros(self.num_data, g.shape[1], g.shape[1])
        return sums.index_add(0, self.data, products)

    def norms(self, weights: Tensor | None = None) -> Tensor:
        g = self.gradients.transpose(0, 1)
        squares = self._weighted(g.square(), weights).sum(2)
        return g.new_zeros(self.num_data, g.shape[1]).index_add(0, self.data, squares)

    def _weighted(self, g: Tensor, weights: Tensor | None) -> Tensor:
        return g if weights is None else g * weights[0][self.table_rows][:, None]

    def apply(self, weight: Tensor) -> Tensor:
        values = torch.einsum("kud,sud->suk", self.gradients, weight[:, 0, self.table_rows])
        sums = values.new_zeros(len(weight), self.num_data, values.shape[-1])
        return sums.index_add(1, self.data, values)

    def combined(self, weights: Tensor) -> Tensor:
        values = torch.einsum("suk,kud->sud", weights[:, self.data], self.gradients)
        sums = values.new_zeros(len(weights), self.num_rows, values.shape[-1])
        return sums.index_add(1, self.table_rows, values)

    def double(self) -> "LookupBlock":
        return replace(self, gradients=self.gradients.double())

    def total(self) -> Tensor:
        sums = self.gradients.new_zeros(self.num_rows, self.gradients.shape[-1])
        return sums.index_add(0, self.table_rows, self.gradients.sum(0))[None]

    def bound(self) -> Tensor:
        return self.gradients.abs().sum()

    def rotated(self, inputs: Tensor | None, outputs: Tensor | None) -> "LookupBlock":
        if inputs is None:
            return self
        return replace(self, gradients=torch.matmul(self.gradients, inputs[0]))

    def split_inputs(self, basis: Tensor) -> tuple["LookupBlock", "LookupBlock"]:
        inside = torch.matmul(self.gradients, basis[0])
        rest = self.gradients - torch.matmul(inside, basis[0].mT)
        return replace(self, gradients=inside), replace(self, gradients=rest)


@dataclass
class DenseBlock:
    """Gradients as rows.

    :param values: (K, n, m).
    """

    position: BlockPosition
    values: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape[-1:]

    def rows(self) -> Tensor:
        return self.values

    def squares(self) -> Tensor:
        return self.values.square().sum((0, 1))

    def total(self) -> Tensor:
        return self.values.sum((0, 1))

    def bound(self) -> Tensor:
        return self.values.abs().sum()

    def gram(self, weights: Tensor | None = None) -> Tensor:
        rows = self.values.transpose(0, 1)
        return torch.matmul(weighted(rows, weights), rows.mT)

    def norms(self, weights: Tensor | None = None) -> Tensor:
        return weighted(self.values.square(), weights).sum(2).mT

    def apply(self, weight: Tensor) -> Tensor:
        return torch.einsum("knm,sm->snk", self.values, weight)

    def combined(self, weights: Tensor) -> Tensor:
        return torch.einsum("snk,knm->sm", weights, self.values)

    def double(self) -> "DenseBlock":
        return replace(self, values=self.values.double())


Block = ProductBlock | LookupBlock | DenseBlock


def weighted(rows: Tensor, weights: Tensor | None) -> Tensor:
    """Multiply the entries of rows (..., m) by weights, if there are any."""
    return rows if weights is None else rows * weights.reshape(-1)


@dataclass
class Jacobian:
    """K columns of gradients for n data in p latents, as blocks over disjoint subsets of the
    latents.

    Latents without a block have gradient zero.
    """

    blocks: list[Block]
    num_columns: int
    num_data: int
    size: int  # p
    like: Tensor

    def rows(self) -> Tensor:
        """Return all gradients as one tensor (K, n, p)."""
        result = self.like.new_zeros(self.num_columns, self.num_data, self.size)
        for block in self.blocks:
            result[..., block.position.indices] = block.rows()
        return result

    def double(self) -> "Jacobian":
        """Return the Jacobian in float64."""
        if self.like.dtype == torch.float64:
            return self
        blocks: list[Block] = [block.double() for block in self.blocks]
        return replace(self, blocks=blocks, like=self.like.double())

    def joint_zeros(self) -> Tensor:
        total = self.num_data * self.num_columns
        return self.like.new_zeros(total, total)

    def apply(self, vectors: Tensor) -> Tensor:
        """Return J v, (S, n, K), for vectors v (S, p)."""
        result = self.like.new_zeros(len(vectors), self.num_data, self.num_columns)
        for block in self.blocks:
            result += block.apply(block.position.spread(vectors, block.shape))
        return result

    def combined(self, weights: Tensor) -> Tensor:
        """Return J' e, (S, p), for weights e (S, n, K)."""
        result = self.like.new_zeros(len(weights), self.size)
        for block in self.blocks:
            entries = block.combined(weights).flatten(1)
            result[:, block.position.indices] += block.position.take(entries)
        return result

    def gram(self, weights: Tensor) -> Tensor:
        """Return the inner products of each datum's columns, (n, K, K), with weights (p,)."""
        result = self.like.new_zeros(self.num_data, self.num_columns, self.num_columns)
        for block in self.blocks:
            result += block.gram(block.position.spread(weights, block.shape))
        return result

    def norms(self, weights: Tensor) -> Tensor:
        """Return the diagonals of ``gram``, (n, K)."""
        result = self.like.new_zeros(self.num_data, self.num_columns)
        for block in self.blocks:
            result += block.norms(block.position.spread(weights, block.shape))
        return result


def merged(blocks: Sequence[Block], entries: Sequence[Tensor | None], part: slice) -> list[Block]:
    """Return the blocks of one site, with blocks that share entries merged.

    Uses of the same entries (tied weights) become positions of one product. Uses that overlap
    otherwise are added as rows.

    :param entries: the entries of the site in each block; None: all, in order.
    :param part: the site's slice in the subset's vector.
    """
    groups: list[tuple[list[Any], Tensor | None]] = []
    for block, own in zip(blocks, entries, strict=True):
        for members, theirs in groups:
            if (
                isinstance(block, ProductBlock)
                and isinstance(members[0], ProductBlock)
                and (block.source is None) == (members[0].source is None)
                and block.shape == members[0].shape
                and same_entries(own, theirs)
            ):
                members.append(block)
                break
        else:
            groups.append(([block], own))
    joined = [_joined(members) for members, _ in groups]
    if len(joined) > 1 and _overlap([own for _, own in groups]):
        return [added(joined, part)]
    return joined


def same_entries(own: Tensor | None, other: Tensor | None) -> bool:
    if own is None or other is None:
        return own is other
    return own.shape == other.shape and torch.equal(own, other)


def _joined(members: list[Any]) -> Any:
    if len(members) == 1:
        return members[0]
    source = None
    if members[0].source is not None:
        inputs = torch.cat([block.source() for block in members], 1)
        source = lambda: inputs  # noqa: E731
    gradients = torch.cat([block.gradients for block in members], 2)
    uses = tuple(number for block in members for number in block.position.uses)
    position = replace(members[0].position, uses=uses)
    return replace(members[0], position=position, source=source, gradients=gradients)


def _overlap(entries: list[Tensor | None]) -> bool:
    if any(own is None for own in entries):
        return True
    numbers = torch.cat([own.reshape(-1) for own in entries if own is not None])
    return len(numbers.unique()) < len(numbers)


def added(blocks: list[Block], part: slice) -> DenseBlock:
    """Sum blocks as rows over all entries of a site."""
    first = blocks[0].rows()
    values = first.new_zeros(*first.shape[:2], part.stop - part.start)
    for block in blocks:
        where = block.position.index_tensor(first.device) - part.start
        values.index_add_(2, where, block.rows().to(values))
    return DenseBlock(BlockPosition((blocks[0].position.key[0], -1), part), values)

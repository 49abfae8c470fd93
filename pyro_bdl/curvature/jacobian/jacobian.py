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

from pyro_bdl.utils.linear_algebra import products

Indices = slice | Tensor
Linear = Callable[[Tensor], Tensor]


@dataclass
class BlockPosition:
    """The position of a block's entries in the vector of a subset.

    :param key: the block's name: the site, and the number of the use.
    :param indices: positions in the subset's vector, one for each entry.
    :param uses: the numbers of the site's uses in the block.
    """

    key: tuple[str, int]
    indices: Indices
    uses: tuple[int, ...] = ()

    def spread(self, vectors: Tensor, shape: torch.Size) -> Tensor:
        """Return the subset's values (..., p) as this block's entries (..., *shape)."""
        values = vectors[..., self.indices]
        return values.reshape(*values.shape[:-1], *shape)

    @property
    def size(self) -> int:
        if isinstance(self.indices, slice):
            return self.indices.stop - self.indices.start
        return len(self.indices)

    def index_tensor(self, device: torch.device) -> Tensor:
        """Return the indices as integers (m,)."""
        if isinstance(self.indices, slice):
            return torch.arange(self.indices.start, self.indices.stop, device=device)
        return self.indices.to(device)


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
        columns, n, positions, groups, out = g.shape
        # all columns in one product: matmul would copy the inputs for each
        left = g.permute(1, 3, 0, 4, 2).reshape(n, groups, columns * out, positions)
        found = torch.matmul(left, a.transpose(1, 2)).unflatten(2, (columns, out))
        return found.permute(2, 0, 1, 3, 4)

    def rows(self, entries: Tensor | None = None) -> Tensor:
        """Gradients in all entries, or some of them, (K, n, m)."""
        if entries is None:
            return self.entries().flatten(2)
        g, a, (_, out, into) = self.gradients, self.inputs, self.shape
        group, o, i = entries // (out * into), entries // into % out, entries % into
        if a is None:
            return g[..., group, o].sum(2)
        rows = g.new_zeros(*g.shape[:2], len(entries))
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

    def mapped(self, inputs: Linear | None, outputs: Linear | None) -> "ProductBlock":
        """Return the gradients with linear functions of a (..., groups, in) and g (..., groups,
        out) in place of these."""
        source, given = self.source, self.source
        if inputs is not None and given is not None:
            source = cache(lambda: inputs(given()))
        gradients = self.gradients if outputs is None else outputs(self.gradients)
        return replace(self, source=source, gradients=gradients)


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

    def rows(self, entries: Tensor | None = None) -> Tensor:
        columns, _, features = self.gradients.shape
        whole = self.gradients.new_zeros(columns, self.num_data, self.num_rows, features)
        whole[:, self.data, self.table_rows] = self.gradients
        return whole.flatten(2) if entries is None else whole.flatten(2)[..., entries]

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

    def mapped(self, inputs: Linear | None, outputs: Linear | None) -> "LookupBlock":
        """Return the gradients with a linear function of the features (..., 1, features)."""
        if inputs is None:
            return self
        return replace(self, gradients=inputs(self.gradients[..., None, :])[..., 0, :])


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

    def rows(self, entries: Tensor | None = None) -> Tensor:
        return self.values if entries is None else self.values[..., entries]

    def squares(self) -> Tensor:
        return self.values.square().sum((0, 1))

    def gram(self, weights: Tensor | None = None) -> Tensor:
        rows = self.values.transpose(0, 1)
        return torch.matmul(weighted(rows, weights), rows.mT)

    def norms(self, weights: Tensor | None = None) -> Tensor:
        return weighted(self.values.square(), weights).sum(2).mT

    def apply(self, weight: Tensor) -> Tensor:
        return torch.einsum("knm,sm->snk", self.values, weight)

    def combined(self, weights: Tensor) -> Tensor:
        return torch.einsum("snk,knm->sm", weights, self.values)


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
            result[:, block.position.indices] += block.combined(weights).flatten(1)
        return result


def grouped(jacobian: Jacobian, size: int) -> Jacobian:
    """Take ``size`` data in a row for one, with their columns one after another, as rows."""
    shape = (jacobian.num_data // size, size, jacobian.num_columns)

    def columns(block: Block) -> Tensor:  # (K, n, m) -> (size K, n / size, m)
        rows = block.rows().transpose(0, 1).unflatten(0, shape[:2])
        return rows.flatten(1, 2).transpose(0, 1)

    blocks: list[Block] = [DenseBlock(b.position, columns(b)) for b in jacobian.blocks]
    return replace(jacobian, blocks=blocks, num_columns=size * shape[2], num_data=shape[0])


def joint_gram(block: Any, weights: Tensor | None = None) -> Tensor:
    """Return sum_e w_e G_ie G_je for all rows i, j of a block, (n K, n K), data before columns.

    For products at single positions, G = g a', the sum over the inputs is computed for each output
    o separately, sum_o g_io g_jo (sum_e a_ie w_oe a_je), without rows over all entries.

    :param weights: not negative, of the block's shape (groups, out, in); None: ones.
    """
    roots = None if weights is None else weights.sqrt()
    if not isinstance(block, ProductBlock) or not block.single:
        rows = weighted(block.rows(), roots)
        return products(rows.transpose(0, 1).flatten(0, 1).mT)
    assert block.source is not None
    a, g = block.source()[:, 0], block.gradients[:, :, 0]  # (n, groups, in), (K, n, groups, out)
    columns, n = g.shape[:2]
    result = g.new_zeros(n, columns, n, columns)
    for group in range(g.shape[2]):
        own = g[:, :, group].transpose(0, 1)  # (n, K, out)
        if roots is None:
            flat = own.reshape(n * columns, -1)
            squares = products(a[:, group].mT)
            result += products(flat.mT).reshape(result.shape) * squares[:, None, :, None]
            continue
        for o in range(own.shape[2]):
            squares = products((a[:, group] * roots[group, o]).mT)
            result += own[:, :, None, None, o] * own[:, :, o] * squares[:, None, :, None]
    return result.reshape(n * columns, n * columns)


def merged(blocks: Sequence[Block], part: slice) -> list[Block]:
    """Return the blocks of one site, with those of the same entries (tied weights) as positions of
    one product; blocks that overlap otherwise are added as rows.

    :param part: the site's slice in the subset's vector.
    """
    groups: dict[Any, list[Any]] = {}
    for block in blocks:
        own = isinstance(block, LookupBlock) and block.position.uses
        groups.setdefault((block.position.key, own), []).append(block)
    joined = [_joined(members) for members in groups.values()]
    if len(joined) > 1:
        where = torch.cat([b.position.index_tensor(b.gradients.device) for b in joined])
        if len(where.unique()) < len(where):
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


def added(blocks: Sequence[Block], part: slice) -> DenseBlock:
    """Sum blocks as rows over all entries of a site."""
    first = blocks[0].rows()
    values = first.new_zeros(*first.shape[:2], part.stop - part.start)
    for block in blocks:
        where = block.position.index_tensor(first.device) - part.start
        values.index_add_(2, where, block.rows().to(values))
    return DenseBlock(BlockPosition((blocks[0].position.key[0], -1), part), values)


@dataclass
class IdentityBlock(ProductBlock):
    """Gradients of a product's outputs z: the gradient of z_k in z is e_k for every datum.

    ``gradients`` are a matrix (K, out) expanded over the data.
    """

    def mapped(self, inputs: Linear | None, outputs: Linear | None) -> "IdentityBlock":
        result = replace(self, source=super().mapped(inputs, None).source)
        if outputs is not None:
            gradients = outputs(self.gradients[:, :1])  # e_k' Q
            result.gradients = gradients.expand(-1, self.gradients.shape[1], -1, -1, -1)
        return result

    @property
    def columns(self) -> Tensor:
        """The gradients of one datum, (K, out)."""
        return self.gradients[:, 0, 0, 0]

    def gram(self, weights: Tensor | None = None) -> Tensor:
        """Return inner products (n, K, K), or (1, K, K) if they are the same for all data."""
        return torch.matmul(self.columns * self._scaled(weights)[:, None], self.columns.mT)

    def norms(self, weights: Tensor | None = None) -> Tensor:
        """Return the diagonals of ``gram``, (n, K) or (1, K)."""
        return self._scaled(weights) @ self.columns.square().mT

    def _scaled(self, weights: Tensor | None) -> Tensor:
        """Return sum_i w_oi a_i^2, (n, out), or (1, out) for a bias."""
        if self.source is not None:
            return self.input_squares(weights)[:, 0].expand(-1, self.columns.shape[1])
        like = self.columns
        return like.new_ones(1, like.shape[1]) if weights is None else weights[..., 0]


@dataclass
class SoftmaxBlock(ProductBlock):
    """The Fisher information of classes whose logits are the outputs of a product.

    The columns of S are sqrt(w p_k) (e_k - p), and S S' = w (diag(p) - p p'). ``gradients`` are p,
    (1, n, 1, 1, out).

    :param weights: w, the tempering of each datum, (n, 1).
    """

    weights: Tensor

    def moments(self) -> Tensor:
        """Return the sums over columns and data of g g', (1, out, out)."""
        p = self.gradients[0, :, 0, 0]
        weighted = self.weights * p
        return (torch.diag(weighted.sum(0)) - weighted.mT @ p)[None]

    def squares(self) -> Tensor:
        p = self.gradients[0, :, 0, 0]
        of_data = self.weights * (p - p.square())
        if self.source is None:
            return of_data.sum(0)[None, :, None]
        return (of_data.mT @ self.source()[:, 0, 0].square())[None]

"""Orthonormal directions in the entries of one weight, as a Kronecker product."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class Eigenbasis:
    """Q = U kron V over the entries of a weight (groups, out, in).

    There may be fewer directions (groups, s, r) than entries; the complement is the space
    orthogonal to them.

    :param shape: the weight's shape.
    :param outputs: U, (groups, out, s) with orthonormal columns; None for the identity.
    :param inputs: V, (groups, in, r); None for the identity.
    """

    shape: torch.Size
    outputs: Tensor | None
    inputs: Tensor | None

    @property
    def directions(self) -> torch.Size:
        """The shape of the directions, (groups, s, r)."""
        groups, out, into = self.shape
        s = out if self.outputs is None else self.outputs.shape[2]
        r = into if self.inputs is None else self.inputs.shape[2]
        return torch.Size((groups, s, r))

    @property
    def complete(self) -> bool:
        return self.directions == self.shape

    @property
    def _few(self) -> tuple[bool, bool]:
        """True for the inputs, and for the outputs, if there are fewer directions than entries."""
        found = self.directions
        return found[2] < self.shape[2], found[1] < self.shape[1]

    def rotate(self, x: Tensor) -> Tensor:
        """Return Q' x for x (..., m), as (..., groups, s, r)."""
        x = x.reshape(*x.shape[:-1], *self.shape)
        if self.outputs is not None:
            x = torch.einsum("gop,...goi->...gpi", self.outputs, x)
        if self.inputs is not None:
            x = torch.einsum("gij,...goi->...goj", self.inputs, x)
        return x

    def back(self, x: Tensor) -> Tensor:
        """Return Q x for x (..., groups, s, r), as (..., groups, out, in)."""
        if self.outputs is not None:
            x = torch.einsum("gop,...gpi->...goi", self.outputs, x)
        if self.inputs is not None:
            x = torch.einsum("gij,...goj->...goi", self.inputs, x)
        return x

    def diagonal(self, values: Tensor) -> Tensor:
        """Return diag(Q diag(values) Q'), (groups, out, in), for values (groups, s, r)."""
        if self.inputs is not None:
            values = torch.einsum("goj,gij->goi", values, self.inputs.square())
        if self.outputs is not None:
            values = torch.einsum("gpi,gop->goi", values, self.outputs.square())
        return values

    def rotated_diagonal(self, diagonal: Tensor) -> Tensor:
        """Return diag(Q' diag(d) Q), (groups, s, r), for d (groups, out, in)."""
        if self.inputs is not None:
            diagonal = torch.einsum("goi,gij->goj", diagonal, self.inputs.square())
        if self.outputs is not None:
            diagonal = torch.einsum("goi,gop->gpi", diagonal, self.outputs.square())
        return diagonal

    def complement_share(self) -> Tensor:
        """Return for every entry the squared length of its unit vector's projection onto the
        complement.

        :returns: (groups, out, in).
        """
        inside: Any = 1.0
        if self.outputs is not None:
            inside = self.outputs.square().sum(2)[:, :, None]
        if self.inputs is not None:
            inside = inside * self.inputs.square().sum(2)[:, None]
        return (1.0 - inside).clamp(min=0.0).expand(self.shape)

    def rotated_matrix_diagonal(self, matrix: Tensor) -> Tensor:
        """Return diag(Q' matrix Q) for a matrix over the flattened entries, (groups, s, r)."""
        groups, out, into = self.shape
        result = []
        for g, part in enumerate(range(0, groups * out * into, out * into)):
            block = matrix[part : part + out * into, part : part + out * into]
            left, right = (
                torch.eye(n, dtype=matrix.dtype, device=matrix.device) if q is None else q[g]
                for n, q in ((out, self.outputs), (into, self.inputs))
            )
            basis = torch.kron(left.contiguous(), right.contiguous()).to(matrix)
            result.append(((block @ basis) * basis).sum(0).reshape(self.directions[1:]))
        return torch.stack(result)

    def matrix(self, values: Tensor) -> Tensor:
        """Return Q diag(values) Q' over the flattened entries, a block for each group."""
        groups, out, into = self.shape
        u, v = (
            torch.eye(n, dtype=values.dtype, device=values.device).expand(groups, n, n)
            if q is None
            else q
            for n, q in ((out, self.outputs), (into, self.inputs))
        )
        blocks = torch.einsum("gop,gij,gpj,gqp,gkj->goiqk", u, v, values, u, v)
        return torch.block_diag(*blocks.reshape(groups, out * into, out * into))

    def completed(self) -> "Eigenbasis":
        """Return a complete basis that begins with these directions."""
        outputs, inputs = (None if q is None else completed(q) for q in (self.outputs, self.inputs))
        return Eigenbasis(self.shape, outputs, inputs)

    def padded(self, values: Tensor) -> Tensor:
        """Pad values with zeros, for the directions that were added."""
        result = values.new_zeros(self.directions)
        result[:, : values.shape[1], : values.shape[2]] = values
        return result

    # Blocks of a Jacobian

    def rotated(self, block: Any) -> Any:
        """Return a block's gradients in the coordinates of these directions."""
        return block.rotated(self.inputs, self.outputs)

    def split(self, block: Any) -> tuple[Any, list[Any]]:
        """Split a block's gradients into these directions and orthogonal blocks of the
        complement."""
        complement = []
        few_inputs, few_outputs = self._few
        if few_inputs:
            block, rest = block.split_inputs(self.inputs)
            complement.append(rest)
        else:
            block = block.rotated(self.inputs, None)
        if few_outputs:
            block, rest = block.split_outputs(self.outputs)
            complement.append(rest)
        else:
            block = block.rotated(None, self.outputs)
        return block, complement

    @property
    def complement_shapes(self) -> list[torch.Size]:
        """The weight shapes of the complement's blocks from ``split``."""
        groups, out, _ = self.shape
        shapes = [self.shape, torch.Size((groups, out, self.directions[2]))]
        return [shape for shape, few in zip(shapes, self._few, strict=True) if few]

    def complement_weights(self, weights: list[Tensor]) -> Iterator[Tensor]:
        """Yield weights in the complement as vectors of the whole weight.

        :param weights: (S, *shape) for every one of ``complement_shapes``.
        :returns: (S, groups, out, in) each; their products with gradients are those of the weights
            with the complement's blocks.
        """
        found = iter(weights)
        few_inputs, few_outputs = self._few
        of_inputs = replace(self, outputs=None)
        if few_inputs:
            weight = next(found)
            yield weight - of_inputs.back(of_inputs.rotate(weight.flatten(1)))
        if few_outputs:
            weight, of_outputs = next(found), replace(self, inputs=None)
            inside = torch.einsum("gop,sgoi->sgpi", self.outputs, weight)
            yield of_inputs.back(weight - of_outputs.back(inside))


def completed(basis: Tensor) -> Tensor:
    """Extend orthonormal columns (groups, m, r) to m columns."""
    size, rank = basis.shape[1:]
    if rank == size:
        return basis
    q = torch.linalg.qr(basis, mode="complete")[0]
    return torch.cat([basis, q[..., rank:]], -1)


def extended(basis: Tensor, rows: Tensor) -> Tensor:
    """Extend orthonormal columns (groups, m, r), so that they span the rows too.

    :param rows: (groups, R, m); R columns are added, but no more than m in total.
    """
    size, rank = basis.shape[1:]
    if rank + rows.shape[1] >= size:
        return completed(basis)
    q = torch.linalg.qr(torch.cat([basis, rows.mT], -1).double())[0]
    return torch.cat([basis, q[..., rank:].to(basis)], -1)

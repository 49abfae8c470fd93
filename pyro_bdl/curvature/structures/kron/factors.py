"""The Kronecker factors of one weight."""

from typing import Any

import torch
from torch import Tensor, nn

from pyro_bdl.curvature.jacobian.block_position import BlockPosition
from pyro_bdl.curvature.jacobian.jacobian import LookupBlock, ProductBlock
from pyro_bdl.curvature.jacobian.output_layers import SoftmaxBlock
from pyro_bdl.curvature.structures.kron.eigenbasis import Eigenbasis
from pyro_bdl.curvature.structures.kron.outer_products import (
    OuterProductSum,
    OuterVectors,
    make_room,
)


class KroneckerFactors(nn.Module):
    """A = sum a a' and B = sum g g' of one weight, (groups, in, in) and (groups, out, out).

    A look-up in a table (rows, features) has a diagonal A (rows,), the number of look-ups of each
    row, and B over the features.
    """

    count: Tensor  # number of data, or of data times positions
    looked_up: Tensor | None
    corrected: Tensor | None  # second moments in the eigenbasis, (groups, s, r)

    def __init__(
        self, position: BlockPosition, shape: torch.Size, like: Tensor, *, lookup: bool
    ) -> None:
        super().__init__()
        self.position, self.shape = position, shape
        groups, out, into = shape
        self.register_buffer("count", torch.zeros((), dtype=torch.float64, device=like.device))
        self.register_buffer("looked_up", like.new_zeros(out) if lookup else None)
        self.register_buffer("corrected", None)
        site = position.key[0]
        self.inputs = None if lookup else OuterProductSum(groups, into, like, site=site)
        self.outputs = OuterProductSum(groups, into if lookup else out, like, site=site)

    def add_inputs(self, block: ProductBlock | LookupBlock, *, reduce: bool) -> None:
        if isinstance(block, LookupBlock):
            assert self.looked_up is not None
            self.looked_up += torch.bincount(block.table_rows, minlength=block.num_rows)
            self.count += block.num_data
            return
        assert self.inputs is not None
        positions = 1 if reduce else block.gradients.shape[2]
        self.count += block.gradients.shape[1] * positions
        if block.source is None:
            number = float(block.gradients.shape[1] * positions)
            self.inputs.add(
                OuterVectors(total=block.gradients.new_full((self.shape[0], 1, 1), number))
            )
            return
        a = block.source().detach()
        self.inputs.add(OuterVectors(a.mean(1, keepdim=True) if reduce else a))

    def sums(self) -> list[OuterProductSum]:
        return [sums for sums in (self.inputs, self.outputs) if sums is not None]

    def counts(self) -> list[Tensor]:
        """The numbers of data and of look-ups; callers may add to them in place."""
        return [self.count] if self.looked_up is None else [self.count, self.looked_up]

    def accumulated(self) -> list[Tensor]:
        """Return the sums so far; callers may add to them in place."""
        inputs = self.looked_up if self.inputs is None else self.inputs.as_matrix()
        assert inputs is not None
        return [inputs, self.outputs.as_matrix(), self.count]

    def correct(self, earlier: "KroneckerFactors | None") -> None:
        """Start to accumulate second moments in the eigenbasis.

        :param earlier: factors of earlier data; their basis is used, extended to the span of these
            data.
        """
        if earlier is not None and earlier.corrected is not None:
            for mine, theirs in zip(self.sums(), earlier.sums(), strict=True):
                theirs.extend(mine)
                mine.take(*theirs.eigen())
            earlier.corrected = earlier.basis().padded(earlier.corrected)
        self.corrected = self.spectrum().new_zeros(self.basis().directions)

    def merge(self, other: "KroneckerFactors") -> None:
        """Add the factors of more data, with second moments in the same basis."""
        if self.corrected is not None:
            assert other.corrected is not None
            self.corrected = self.corrected + other.corrected
        else:
            for mine, theirs in zip(self.sums(), other.sums(), strict=True):
                mine.merge(theirs)
        if self.looked_up is not None and other.looked_up is not None:
            self.looked_up += other.looked_up
        self.count += other.count

    def scale(self, factor: float) -> None:
        if self.corrected is not None:
            self.corrected *= factor
        elif factor != 1.0:
            self.outputs.scale(factor)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        make_room(self, ("corrected",), state, prefix, next(self.outputs.buffers()))
        super()._load_from_state_dict(state, prefix, *rest)

    # Results

    def basis(self) -> Eigenbasis:
        """The eigenvectors of both factors; each row of a table is a separate direction."""
        if self.inputs is None:
            return Eigenbasis(self.shape, None, self.outputs.eigen()[1])
        return Eigenbasis(self.shape, self.outputs.eigen()[1], self.inputs.eigen()[1])

    def complete_basis(self) -> Eigenbasis:
        """Complete the basis and return it, for priors that vary between directions."""
        for sums in self.sums():
            sums.complete()
        if self.corrected is not None:
            self.corrected = self.basis().padded(self.corrected)
        return self.basis()

    def spectrum(self) -> Tensor:
        """Return the curvature in the directions of the basis, (groups, s, r).

        It is zero in the complement.
        """
        if self.corrected is not None:
            return self.corrected
        outputs = self.outputs.eigen()[0]
        count = self.count.to(outputs.dtype).clamp(min=1.0)
        if self.inputs is None:
            assert self.looked_up is not None
            return (self.looked_up / count)[None, :, None] * outputs[:, None, :]
        return outputs[:, :, None] * (self.inputs.eigen()[0] / count)[:, None, :]

    def matrix(self) -> Tensor:
        """The block as a matrix over the flattened weight."""
        return self.basis().matrix(self.spectrum())

    def diagonal(self) -> Tensor:
        """The block's diagonal, (groups * out * in,)."""
        return self.basis().diagonal(self.spectrum()).flatten()


def output_vectors(
    block: ProductBlock | LookupBlock, *, reduce: bool, reused: bool
) -> OuterVectors:
    """Return the vectors g of a block, whose outer products sum to B."""
    if isinstance(block, SoftmaxBlock):
        return OuterVectors(total=block.moments())
    if isinstance(block, LookupBlock):
        return OuterVectors(block.gradients.flatten(0, 1)[:, None, None], reused=reused)
    g = block.gradients.flatten(0, 1)
    return OuterVectors(g.sum(1, keepdim=True) if reduce else g, reused=reused)

"""The position of a block of latents in the vector of a subset."""

from dataclasses import dataclass

import torch
from torch import Tensor

Indices = slice | Tensor


@dataclass
class BlockPosition:
    """The position of a block's entries in the vector of a subset.

    :param key: the block's name: the site, and the number of the use.
    :param indices: positions in the subset's vector, one for each chosen entry.
    :param chosen: the block's flattened entries that are in the subset; None: all.
    :param uses: the numbers of the site's uses in the block.
    """

    key: tuple[str, int]
    indices: Indices
    chosen: Tensor | None = None
    uses: tuple[int, ...] = ()

    def take(self, entries: Tensor) -> Tensor:
        """Select the entries (..., m) of a block that are in the subset."""
        return entries if self.chosen is None else entries[..., self.chosen]

    def spread(self, vectors: Tensor, shape: torch.Size) -> Tensor:
        """Return the subset's values (..., p) as this block's entries (..., *shape).

        Entries that are not in the subset are zero.
        """
        values = vectors[..., self.indices]
        if self.chosen is not None:
            whole = values.new_zeros(*values.shape[:-1], shape.numel())
            whole[..., self.chosen] = values
            values = whole
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

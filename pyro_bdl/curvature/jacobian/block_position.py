"""Where the entries of a part of the latents lie in the vector of a subset."""

from dataclasses import dataclass

import torch
from torch import Tensor

Indices = slice | Tensor


@dataclass
class BlockPosition:
    """Where a block's entries lie.

    :param key: names the block: the site, and which use of it.
    :param indices: in the vector of the subset, one for each chosen entry.
    :param chosen: which of the block's flattened entries are in the subset; None: all.
    :param uses: the numbers of the site's uses that the block is made of.
    """

    key: tuple[str, int]
    indices: Indices
    chosen: Tensor | None = None
    uses: tuple[int, ...] = ()

    def take(self, entries: Tensor) -> Tensor:
        """Entries (..., m) of the whole block that are in the subset."""
        return entries if self.chosen is None else entries[..., self.chosen]

    def spread(self, vectors: Tensor, shape: torch.Size) -> Tensor:
        """The subset's values (..., p) as all of this block's entries (..., *shape), zeros at
        those that are not in the subset."""
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
        """The indices as integers (m,)."""
        if isinstance(self.indices, slice):
            return torch.arange(self.indices.start, self.indices.stop, device=device)
        return self.indices.to(device)

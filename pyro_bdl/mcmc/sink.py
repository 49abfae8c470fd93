"""Draws that are kept in files instead of memory."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


class Sink:
    """The latents of all chains in memory-mapped files, one for each site.

    Each draw has its place in the files. A run that goes on after a kill writes the draws that it
    makes again to the same places.

    :param folder: where the files are.
    :param constrain: vectors (..., P) -> site -> (..., *shape), in the sites' supports.
    :param start: vectors (chains, P), which give shapes and precision.
    :param draws: of each chain.
    :raises ValueError: if the folder holds files of another size.
    """

    def __init__(
        self,
        folder: str | Path,
        constrain: Callable[[Tensor], dict[str, Tensor]],
        start: Tensor,
        draws: int,
    ) -> None:
        self.constrain = constrain
        Path(folder).mkdir(parents=True, exist_ok=True)
        with torch.no_grad():
            example = constrain(start)
        self.files = {site: Path(folder, f"latents-{i}.bin") for i, site in enumerate(example)}
        self.shapes = {
            site: (len(start), draws, *value.shape[1:]) for site, value in example.items()
        }
        self.dtypes = {site: value.dtype for site, value in example.items()}
        for site, file in self.files.items():
            needed = torch.Size(self.shapes[site]).numel() * self.dtypes[site].itemsize
            if file.exists() and file.stat().st_size != needed:
                raise ValueError(
                    f"'{file}' holds another number of draws or chains of the site '{site}': "
                    "num_samples cannot change for draws on disk; name another folder, or remove it"
                )
        self._mapped = self._tensors(shared=True)

    def _tensors(self, *, shared: bool) -> dict[str, Tensor]:
        return {
            site: torch.from_file(
                str(file),
                shared=shared,
                size=torch.Size(self.shapes[site]).numel(),
                dtype=self.dtypes[site],
            ).reshape(self.shapes[site])
            for site, file in self.files.items()
        }

    @torch.no_grad()
    def put(self, chain: int | slice, first: int, vectors: Tensor) -> None:
        """Write draws of one chain (draws, P), or of all (chains, draws, P).

        :param first: the place of the first of them.
        """
        places = slice(first, first + vectors.shape[-2])
        for site, value in self.constrain(vectors).items():
            self._mapped[site][chain, places] = value.to(self._mapped[site])

    def flush(self) -> None:
        """Have all draws so far on the disk, so that a state may name them."""
        for file in self.files.values():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())

    def latents(self) -> dict[str, Tensor]:
        """All draws, site -> (chains, draws, *shape), read from the files where they are used.

        Changes of these tensors do not reach the files.
        """
        return self._tensors(shared=False)

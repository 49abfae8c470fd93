"""Products of the Gauss-Newton matrix of all data with vectors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.at import At
from pyro_bdl.curvature.hyperparameters import learned_noise, read
from pyro_bdl.curvature.linearized_data import LinearizedBatch, LinearizedData
from pyro_bdl.program.batches import Batches
from pyro_bdl.utils.random_state import seeded


class GaussNewtonProducts:
    """sum_n J_n' F_n J_n times vectors, from products with J and J' alone.

    F is at the noise that a Normal observation has when this is made, whatever it is later.

    :param passes: the data, and the factor of the sums over them.
    """

    def __init__(self, at: At, passes: Sequence[tuple[Batches, float]]) -> None:
        self.at, self.passes = at, passes
        self.noise = self._noise()

    def __add__(self, other: "GaussNewtonProducts") -> "GaussNewtonProducts":
        """The products over the data of both."""
        return GaussNewtonProducts(self.at, [*self.passes, *other.passes])

    def __deepcopy__(self, memo: Any) -> "GaussNewtonProducts":
        return self  # the program and the data are shared

    def _noise(self) -> Tensor | None:
        first = self.passes[0][0].first()
        return learned_noise(read(self.at.model, self.at.subset, self.at.vector, *first))

    @contextmanager
    def held(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Return a function of vectors (S, p) that returns their products (S, p).

        The graphs of the data are kept until exit where they fit in memory.
        """
        data = LinearizedData(self.at, self.passes)
        here = torch.zeros_like(self.at.subset.take(self.at.vector))
        now = self._noise()
        factor: Tensor | float = 1.0
        if now is not None and self.noise is not None:
            factor = (now / self.noise).square().mean()

        def times(vectors: Tensor) -> Tensor:
            rounded = vectors.to(self.at.vector)

            def of_batch(batch: LinearizedBatch) -> Tensor:
                return batch.times(here, rounded)

            with seeded(0):  # where F is estimated, it is the same in all products
                return (factor * data.sum(of_batch)).to(vectors)

        yield times

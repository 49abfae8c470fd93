"""Draws of a Gaussian with mean zero, for linear functions of the draws."""

from typing import Protocol

from torch import Tensor

from pyro_bdl.curvature.jacobian.jacobian import Jacobian


class LinearDraws(Protocol):
    """S draws w in R^p that can be multiplied by Jacobians."""

    def __len__(self) -> int: ...

    def vectors(self) -> Tensor:
        """Return the draws themselves, (S, p)."""
        ...

    def apply(self, jacobian: Jacobian) -> Tensor:
        """Return J w for every draw w, (S, n, K)."""
        ...


class VectorDraws:
    """Draws as vectors (S, p)."""

    def __init__(self, vectors: Tensor) -> None:
        self._vectors = vectors

    def __len__(self) -> int:
        return len(self._vectors)

    def vectors(self) -> Tensor:
        return self._vectors

    def apply(self, jacobian: Jacobian) -> Tensor:
        return jacobian.apply(self._vectors.to(jacobian.like))

"""Draws of a Gaussian with mean zero, for what is linear in them.

A draw from Kronecker factors stays in its eigenbasis, into which the gradients of functions are
turned: a few vectors in the place of all draws of a weight.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.jacobian import Dense, Jacobian
from pyro_bdl.curvature.structures.kron.eigenbasis import Eigenbasis


class Offsets(Protocol):
    """S draws in R^p."""

    def __len__(self) -> int: ...

    def apply(self, jacobian: Jacobian) -> Tensor:
        """J w for every draw w, (S, n, K)."""
        ...


class Drawn:
    """Draws as vectors (S, p)."""

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors

    def __len__(self) -> int:
        return len(self.vectors)

    def apply(self, jacobian: Jacobian) -> Tensor:
        return jacobian.apply(self.vectors.to(jacobian.like))


class EigenOffsets:
    """Draws of one weight (groups, out, in), independent within the directions Q and outside them:
    the covariance is Q diag(1 / values) Q' + (1 - Q Q') / rest.

    :param basis: Q.
    :param values: positive, (groups, s, r).
    :param rest: a positive scalar; None where Q is complete.
    """

    def __init__(
        self, num_samples: int, basis: Eigenbasis, values: Tensor, rest: Tensor | None
    ) -> None:
        def noise(shape: torch.Size) -> Tensor:
            return torch.randn(num_samples, *shape, dtype=values.dtype, device=values.device)

        self.basis, self.count = basis, num_samples
        self.inside = noise(basis.directions).mul_(values.rsqrt())
        self.outside: list[Tensor] = []
        if rest is not None:
            self.outside = [noise(shape).mul_(rest.rsqrt()) for shape in basis.outside_shapes]

    def vectors(self) -> Tensor:
        """(S, groups * out * in)."""
        result = self.basis.back(self.inside)
        for part in self.basis.outside_parts(self.outside):
            result += part
        return result.flatten(1)

    def apply(self, block: Any) -> Tensor:
        """The products with a block's gradients, (S, n, K)."""
        if isinstance(block, Dense):
            return block.apply(self.vectors())
        inside, outside = self.basis.parts(block)
        result = inside.apply(self.inside)
        for part, noise in zip(outside, self.outside, strict=True):
            result = result + part.apply(noise)
        return result

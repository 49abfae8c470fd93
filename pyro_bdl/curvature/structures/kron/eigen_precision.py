"""The precision of one weight with Kronecker factors, and its draws."""

from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.block_position import BlockPosition
from pyro_bdl.curvature.jacobian.gram import joint_gram
from pyro_bdl.curvature.jacobian.jacobian import DenseBlock
from pyro_bdl.curvature.structures.kron.eigenbasis import Eigenbasis

_NOISE_AT_ONCE = 2**26  # bytes of noise that are drawn at once


class EigenbasisDraws:
    """Draws of one weight (groups, out, in), stored in the eigenbasis.

    Their covariance is Q diag(1 / values) Q' + (1 - Q Q') / rest. The gradients of functions are
    rotated into the eigenbasis instead of the draws, which are far more numbers.

    :param basis: Q.
    :param values: positive, (groups, s, r).
    :param rest: a positive scalar; None if Q is complete.
    """

    def __init__(
        self, num_samples: int, basis: Eigenbasis, values: Tensor, rest: Tensor | None
    ) -> None:
        def noise(shape: torch.Size) -> Tensor:
            return torch.randn(num_samples, *shape, dtype=values.dtype, device=values.device)

        self.basis, self.count = basis, num_samples
        self.inside = noise(basis.directions).mul_(values.rsqrt())
        self.complement: list[Tensor] = []
        if rest is not None:
            self.complement = [noise(shape).mul_(rest.rsqrt()) for shape in basis.complement_shapes]

    def vectors(self) -> Tensor:
        """Return the draws themselves, (S, groups * out * in)."""
        result = self.basis.back(self.inside)
        for part in self.basis.complement_weights(self.complement):
            result += part
        return result.flatten(1)

    def apply(self, block: Any) -> Tensor:
        """Return the products with a block's gradients, (S, n, K)."""
        if isinstance(block, DenseBlock):
            return block.apply(self.vectors())
        inside, complement = self.basis.split(block)
        result = inside.apply(self.inside)
        for part, noise in zip(complement, self.complement, strict=True):
            result = result + part.apply(noise)
        return result


class EigenPrecision:
    """The precision Q diag(values) Q' + rest (1 - Q Q') of one weight, with Q a Kronecker product.

    :param position: the weight's position in the subset.
    :param basis: Q.
    :param values: positive, (groups, s, r).
    :param rest: the precision in Q's complement, a positive scalar; None if Q is complete.
    """

    def __init__(
        self, position: BlockPosition, basis: Eigenbasis, values: Tensor, rest: Tensor | None
    ) -> None:
        if not (values > 0).all() or (rest is not None and not rest > 0):
            raise ValueError(
                f"the posterior precision of '{position.key[0]}' is not positive: directions "
                "without curvature need a prior with a finite variance"
            )
        self.basis, self.values, self.rest = basis, values, rest
        self.size = basis.shape.numel()

    def logdet(self) -> Tensor:
        total = self.values.log().sum()
        if self.rest is None:
            return total
        return total + (self.size - self.values.numel()) * self.rest.log()

    def weighted_trace(self, weights: Tensor) -> Tensor:
        if bool((weights != weights[0]).any()):
            return (weights * self.variances()).sum()
        total = self.values.reciprocal().sum()
        if self.rest is not None:
            total = total + (self.size - self.values.numel()) / self.rest
        return weights[0] * total

    def sample(self, num_samples: int) -> Tensor:
        like = self.values
        result = like.new_empty(num_samples, self.size)
        at_once = max(1, _NOISE_AT_ONCE // (like.element_size() * self.size))
        for part in result.split(at_once):
            part.copy_(self.draw(len(part)).vectors())
        return result

    def draw(self, num_samples: int) -> EigenbasisDraws:
        return EigenbasisDraws(num_samples, self.basis, self.values, self.rest)

    def quadratic(self, x: Tensor) -> Tensor:
        squares = self.basis.rotate(x).square()
        if self.rest is None:
            return (squares * self.values).sum((-3, -2, -1))
        inside = (squares * (self.values - self.rest)).sum((-3, -2, -1))
        return inside + self.rest * x.square().sum(-1)

    def solve(self, x: Tensor) -> Tensor:
        inside = self.basis.rotate(x)
        result = self.basis.back(inside / self.values).reshape(x.shape)
        if self.rest is None:
            return result
        complement = x - self.basis.back(inside).reshape(x.shape)
        # project twice, since the smallest precision would magnify rounding errors
        complement = complement - self.basis.back(self.basis.rotate(complement)).reshape(x.shape)
        return result + complement / self.rest

    def variances(self) -> Tensor:
        result = self.basis.diagonal(self.values.reciprocal())
        if self.rest is not None:
            result = result + self.basis.complement_share() / self.rest
        return result.flatten()

    # Linear functions with the gradients of a block

    def covariance(self, block: Any) -> Tensor:
        if isinstance(block, DenseBlock):
            rows = self._whitened(block).transpose(0, 1)
            return rows @ rows.mT
        inside, complement = self.basis.split(block)
        result = inside.gram(self.values.reciprocal())
        for part in complement:
            result = result + part.gram() / self.rest
        return result

    def output_variances(self, block: Any) -> Tensor:
        if isinstance(block, DenseBlock):
            return self._whitened(block).square().sum(2).mT
        inside, complement = self.basis.split(block)
        result = inside.norms(self.values.reciprocal())
        for part in complement:
            result = result + part.norms() / self.rest
        return result

    def joint_covariance(self, block: Any) -> Tensor:
        if isinstance(block, DenseBlock):
            rows = self._whitened(block).transpose(0, 1).flatten(0, 1)
            return rows @ rows.mT
        inside, complement = self.basis.split(block)
        result = joint_gram(inside, self.values.reciprocal())
        for part in complement:
            assert self.rest is not None
            result += joint_gram(part) / self.rest
        return result

    def _whitened(self, block: DenseBlock) -> Tensor:
        """Return gradients (K, n, m) whose inner products are covariances."""
        inside = self.basis.rotate(block.values)
        rows = (inside * self.values.rsqrt()).flatten(-3)
        if self.rest is None:
            return rows
        complement = block.values - self.basis.back(inside).flatten(-3)
        return torch.cat([rows, complement * self.rest.rsqrt()], -1)

"""The Kronecker factors of one weight, and the Gaussian with their eigenvectors."""

from typing import Any

import torch
from torch import Tensor, nn

from pyro_bdl.curvature.dense import products
from pyro_bdl.curvature.direct import SoftmaxProduct
from pyro_bdl.curvature.jacobian import Dense, Lookup, Place, Product

_DOUBLE_UP_TO = 2048


class ProductFactors(nn.Module):
    """A = sum a a' and B = sum g g' of one weight, (groups, in, in) and (groups, out, out).

    A look-up of rows v in a table (rows, features) has a diagonal A, how many data look up each
    row, (rows,), and B over the features.
    """

    inputs: Tensor
    outputs: Tensor
    count: Tensor
    values: Tensor | None
    inputs_basis: Tensor | None
    outputs_basis: Tensor | None

    def __init__(self, place: Place, shape: torch.Size, like: Tensor, *, lookup: bool) -> None:
        super().__init__()
        self.place, self.shape = place, shape
        groups, out, into = shape
        inputs = like.new_zeros(out) if lookup else like.new_zeros(groups, into, into)
        features = into if lookup else out
        self.register_buffer("inputs", inputs)
        self.register_buffer("outputs", like.new_zeros(groups, features, features))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64, device=like.device))
        for name in ("values", "inputs_basis", "outputs_basis"):
            self.register_buffer(name, None)

    def add_inputs(self, block: Product | Lookup, *, reduce: bool) -> None:
        if isinstance(block, Lookup):
            self.inputs += torch.bincount(block.rows_of, minlength=block.num_rows)
            self.count += block.num_data
            return
        positions = 1 if reduce else block.gradients.shape[2]
        self.count += block.gradients.shape[1] * positions
        if block.source is None:
            self.inputs += float(block.gradients.shape[1] * positions)
            return
        a = block.source()
        self.inputs += moments(a.mean(1, keepdim=True) if reduce else a)

    def decompose(self) -> None:
        """Eigenvectors of both factors, and the products of their eigenvalues (groups, out, in)."""
        count = self.count.to(self.inputs.dtype).clamp(min=1.0)
        if self.inputs.dim() == 1:  # rows by features, and it is the features that have a basis
            outputs, self.inputs_basis = eigen(self.outputs)
            self.values = (self.inputs / count)[None, :, None] * outputs[:, None, :]
            return
        inputs, self.inputs_basis = eigen(self.inputs)
        outputs, self.outputs_basis = eigen(self.outputs)
        self.values = outputs[:, :, None] * (inputs / count)[:, None, :]

    def matrix(self) -> Tensor:
        """The block as a matrix over the flattened weight."""
        assert self.values is not None
        groups, out, into = self.shape
        inputs, outputs = self.inputs_basis, self.outputs_basis
        assert inputs is not None
        if outputs is None:
            outputs = torch.eye(out, device=self.values.device).to(self.values)[None]
        blocks = torch.einsum(
            "gop,gij,gpj,gqp,gkj->goiqk", outputs, inputs, self.values, outputs, inputs
        )
        return torch.block_diag(*blocks.reshape(groups, out * into, out * into))

    def rotated(self, block: Any) -> Any:
        """A block's gradients in the eigenbases."""
        return block.rotated(self.inputs_basis, self.outputs_basis)

    def diagonal(self) -> Tensor:
        """The block's diagonal, (groups * out * in,)."""
        assert self.values is not None
        return spread_values(self, self.values).flatten()


def output_rows(block: Product | Lookup, *, reduce: bool) -> Tensor:
    """B of a block, (groups, out, out)."""
    if isinstance(block, SoftmaxProduct):
        return block.moments()
    if isinstance(block, Lookup):
        return moments(block.gradients.flatten(0, 1)[:, None, None])
    parts = [moments(g.sum(1, keepdim=True) if reduce else g) for g in block.gradients]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def moments(x: Tensor) -> Tensor:
    """sum x x' over data and positions for x (n, T, groups, m): (groups, m, m)."""
    n, positions, groups, size = x.shape
    if positions > 1 and size <= 2 * positions:  # without copies of what lies features first
        x = x.permute(2, 0, 1, 3)
        return torch.stack([products(part).sum(0) for part in x])
    return products(x.reshape(n * positions, groups, size).transpose(0, 1))


def eigen(factor: Tensor) -> tuple[Tensor, Tensor]:
    precise = factor.double() if factor.shape[-1] <= _DOUBLE_UP_TO else factor
    values, vectors = torch.linalg.eigh(precise)
    return values.clamp(min=0.0).to(factor.dtype), vectors.to(factor.dtype)


def spread_values(factors: ProductFactors, values: Tensor) -> Tensor:
    """diag(Q diag(values) Q') in the weight's own entries, (groups, out, in)."""
    if factors.inputs_basis is not None:
        values = torch.einsum("goj,gij->goi", values, factors.inputs_basis.square())
    if factors.outputs_basis is not None:
        values = torch.einsum("gpi,gop->goi", values, factors.outputs_basis.square())
    return values


class EigenPrecision:
    """The precision Q diag(values) Q' of one weight, Q a Kronecker product."""

    def __init__(self, factors: ProductFactors, values: Tensor) -> None:
        if not (values > 0).all():
            raise ValueError(
                f"the posterior precision of '{factors.place.key[0]}' is not positive: directions "
                "without curvature need a prior with a finite variance"
            )
        self.factors, self.values = factors, values
        self.size = values.numel()

    def logdet(self) -> Tensor:
        return self.values.log().sum()

    def sample(self, num_samples: int) -> Tensor:
        like = self.values
        x = torch.randn(num_samples, *like.shape, dtype=like.dtype, device=like.device)
        return self._back(x * like.rsqrt()).flatten(1)

    def quadratic(self, x: Tensor) -> Tensor:
        return (self._rotate(x).square() * self.values).sum((-3, -2, -1))

    def solve(self, x: Tensor) -> Tensor:
        return self._back(self._rotate(x) / self.values).reshape(x.shape)

    def _rotate(self, x: Tensor) -> Tensor:
        """Q' x for x (..., m), as (..., groups, out, in)."""
        x = x.reshape(*x.shape[:-1], *self.values.shape)
        if self.factors.outputs_basis is not None:
            x = torch.einsum("gop,...goi->...gpi", self.factors.outputs_basis, x)
        if self.factors.inputs_basis is not None:
            x = torch.einsum("gij,...goi->...goj", self.factors.inputs_basis, x)
        return x

    def _back(self, x: Tensor) -> Tensor:
        """Q x for x (..., groups, out, in)."""
        if self.factors.outputs_basis is not None:
            x = torch.einsum("gop,...gpi->...goi", self.factors.outputs_basis, x)
        if self.factors.inputs_basis is not None:
            x = torch.einsum("gij,...goj->...goi", self.factors.inputs_basis, x)
        return x

    def variances(self) -> Tensor:
        return spread_values(self.factors, self.values.reciprocal()).flatten()

    def block_covariance(self, block: Any) -> Tensor:
        if isinstance(block, Dense):
            rows = self.block_rows(block).transpose(0, 1)
            return rows @ rows.mT
        return self.factors.rotated(block).gram(self.values.reciprocal())

    def block_rows(self, block: Any) -> Tensor:
        """Whitened gradients (K, n, m), so that their inner products are covariances."""
        if isinstance(block, Dense):
            return (self._rotate(block.values) * self.values.rsqrt()).flatten(-3)
        rotated = self.factors.rotated(block)
        entries = rotated.entries().flatten(2) if isinstance(rotated, Product) else rotated.rows()
        return entries * self.values.rsqrt().flatten()

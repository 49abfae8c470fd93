"""Kronecker-factored curvature: KFAC, and its eigenvalue-corrected form EKFAC.

For a product z_t = W a_t the block of W in sum_n J_n' J_n is approximated by
(1/R) (sum a a') kron (sum g g') with sums over data, positions t and columns, R the number of
data times positions ("expand"); or, with a averaged and g summed over the positions, R the number
of data ("reduce"). Both are exact for one datum with one position. Sources: Martens & Grosse 2015;
Grosse & Martens 2016 for convolutions; Eschenhagen et al. 2023 for expand and reduce; George et
al. 2018 for EKFAC. Latents outside products have exact blocks of their own, dense up to 1024
numbers and diagonal beyond; blocks of different sites are independent.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bdl.curvature.factors import (
    EigenPrecision,
    ProductFactors,
    output_rows,
)
from pyro_bdl.curvature.gaussian import DiagonalPrecision, FullPrecision, Precision
from pyro_bdl.curvature.jacobian import (
    Block,
    Dense,
    Jacobian,
    Lookup,
    Place,
    Product,
)
from pyro_bdl.curvature.kronecker_precision import KroneckerPrecision
from pyro_bdl.curvature.prior import PriorPrecision

_DENSE_UP_TO = 1024


class DenseBlock(nn.Module):
    """Exact curvature of latents outside products: a matrix, or its diagonal if it is large."""

    values: Tensor

    def __init__(self, place: Place, size: int, like: Tensor) -> None:
        super().__init__()
        self.place = place
        shape = (size, size) if size <= _DENSE_UP_TO else (size,)
        self.register_buffer("values", like.new_zeros(shape))

    def add(self, block: Block) -> None:
        rows = block.rows().flatten(0, 1)
        self.values += rows.mT @ rows if self.values.dim() == 2 else rows.square().sum(0)

    def diagonal(self) -> Tensor:
        return self.values.diagonal() if self.values.dim() == 2 else self.values


class KroneckerCurvature(nn.Module):
    """Kronecker factors of every product, exact blocks of the rest.

    :param reduce: average inputs and add gradients over positions, instead of taking every
        position as a datum of its own.
    :param corrected: a second pass over the data replaces the products of eigenvalues by the
        second moments of the gradients in the eigenbasis (EKFAC).
    :param start: a curvature of earlier data that this one will be merged into; its eigenbases
        are then used.
    """

    like: Tensor

    def __init__(
        self,
        size: int,
        like: Tensor,
        *,
        reduce: bool = False,
        corrected: bool = False,
        start: "KroneckerCurvature | None" = None,
    ) -> None:
        super().__init__()
        self.__dict__["_start"] = start
        self.size, self.reduce, self.corrected = size, reduce, corrected
        self.passes = 2 if corrected else 1
        self.register_buffer("like", like.new_zeros(0), persistent=False)
        self.products: Any = nn.ModuleDict()
        self.rest: Any = nn.ModuleDict()
        self._names: dict[tuple[str, int], str] = {}
        self._seen: set[tuple[tuple[str, int], tuple[int, ...]]] = set()
        self._rotated: dict[Any, Any] = {}
        self._pass = 0
        self._decomposed = False

    # Accumulation

    def start_pass(self, number: int) -> None:
        self._pass = number
        if number == 1:
            self._decompose()
            for key, name in self._names.items():
                if name in self.products:
                    self._prepare(self.products[name], key)
            self.__dict__["_start"] = None

    def _prepare(self, factors: Any, key: tuple[str, int]) -> None:
        """No second moments yet, in the basis of earlier data if there is one."""
        factors.values = torch.zeros_like(factors.values)
        start = self.__dict__["_start"]
        if start is not None and start._names.get(key) in start.products:
            earlier = start.products[start._names[key]]
            factors.inputs_basis = earlier.inputs_basis
            factors.outputs_basis = earlier.outputs_basis

    def end_batch(self) -> None:
        self._seen.clear()
        self._rotated.clear()

    def add(self, jacobian: Jacobian) -> None:
        outputs: dict[int, Tensor] = {}  # of gradients that a weight and a bias share
        for block in jacobian.blocks:
            if block.place.chosen is not None:
                raise ValueError(
                    f"a part of the entries of site '{block.place.key[0]}' has no Kronecker "
                    'factors: choose whole sites, or structure="full", "diag" or "low_rank"'
                )
            if isinstance(block, Dense):
                if self._pass == 0:
                    self._rest(block).add(block)
                continue
            factors = self._factors(block)
            origin = block.place.key, block.place.uses
            if self._pass == 1:
                rotated = factors.rotated(block)
                if isinstance(rotated, Product):  # its inputs are the same for other columns
                    rotated = replace(
                        rotated, source=self._rotated.setdefault(origin, rotated.source)
                    )
                factors.values += rotated.squares()
                continue
            if origin not in self._seen:
                self._seen.add(origin)
                factors.add_inputs(block, reduce=self.reduce)
            if id(block.gradients) not in outputs:
                outputs[id(block.gradients)] = output_rows(block, reduce=self.reduce)
            factors.outputs += outputs[id(block.gradients)]

    def _factors(self, block: Product | Lookup) -> Any:
        key = block.place.key
        if key not in self._names:
            self._names[key] = f"product{len(self.products)}"
            self.products[self._names[key]] = ProductFactors(
                block.place, block.shape, self.like, lookup=isinstance(block, Lookup)
            )
        return self.products[self._names[key]]

    def _rest(self, block: Dense) -> Any:
        key = block.place.key
        if key not in self._names:
            self._names[key] = f"rest{len(self.rest)}"
            self.rest[self._names[key]] = DenseBlock(block.place, block.place.size, self.like)
        return self.rest[self._names[key]]

    def sums(self) -> list[Tensor]:
        """What the last pass has added up, by place, to be added to in place."""
        result = []
        for key in sorted(self._names):
            name = self._names[key]
            if name in self.products:
                of: Any = self.products[name]
                first = self._pass == 0
                result += [of.inputs, of.outputs, of.count] if first else [of.values]
            elif self._pass == 0:
                result.append(self.rest[name].values)
        return result

    def scale(self, factor: float) -> None:
        for factors in self.products.values():
            factors.outputs *= factor
            if factors.values is not None:
                factors.values *= factor
        for block in self.rest.values():
            block.values *= factor

    def merge(self, other: "KroneckerCurvature") -> None:
        """Add a curvature of more data, whose eigenvalue corrections are in this one's bases."""
        for key, name in other._names.items():
            theirs: Any = (other.products if name in other.products else other.rest)[name]
            if key not in self._names:
                kind = "product" if name in other.products else "rest"
                table = self.products if kind == "product" else self.rest
                self._names[key] = f"{kind}{len(table)}"
                table[self._names[key]] = theirs
                continue
            mine: Any = (self.products if name in other.products else self.rest)[self._names[key]]
            if isinstance(mine, DenseBlock):
                mine.values += theirs.values
                continue
            if self.corrected:
                mine.values = mine.values + theirs.values
            mine.inputs += theirs.inputs
            mine.outputs += theirs.outputs
            mine.count += theirs.count
        self._decomposed = self.corrected

    def _decompose(self) -> None:
        for factors in self.products.values():
            factors.decompose()
        self._decomposed = True

    # Algebra

    def with_prior(self, prior: PriorPrecision, factor: Tensor | float = 1.0) -> KroneckerPrecision:
        """factor times this curvature, plus the prior's; a prior that varies within a product
        enters by its diagonal in the product's eigenbasis, one that couples sites by its blocks.
        """
        if not self._decomposed:
            self._decompose()
        parts: list[tuple[Place, Any]] = []
        covered = torch.zeros(self.size, dtype=torch.bool, device="cpu")
        for place, block in self._blocks():
            covered[place.numbers(covered.device)] = True
            if isinstance(block, Tensor):
                parts.append((place, _rest_precision(block * factor, prior, place)))
                continue
            added = prior.diagonal[place.positions].to(self.like).reshape(block.shape)
            if _couples(prior, place):
                added = _turned_diagonal(block, prior.within(place.positions).to(self.like))
            elif _varies(added):
                added = _in_basis(block, added)
            parts.append((place, EigenPrecision(block, block.values * factor + added)))
        left = (~covered).nonzero()[:, 0].to(self.like.device)
        if len(left):
            zero = self.like.new_zeros(len(left))
            parts.append((Place(("", 0), left), _rest_precision(zero, prior, Place(("", 0), left))))
        return KroneckerPrecision(self.size, parts, self.like)

    def _blocks(self) -> list[tuple[Place, Any]]:
        """Blocks over disjoint latents: products, and exact matrices or diagonals.

        Where blocks of a site share entries, which outputs that use it differently give, they
        are added up in one.
        """
        by_site: dict[str, list[tuple[Place, Any]]] = {}
        for module in (*self.products.values(), *self.rest.values()):
            block: Any = module
            value = block.values if isinstance(block, DenseBlock) else block
            by_site.setdefault(block.place.key[0], []).append((block.place, value))
        result = []
        for site, members in by_site.items():
            numbers = [place.numbers(self.like.device) for place, _ in members]
            union, inverse = torch.cat(numbers).unique(return_inverse=True)
            if len(union) == len(inverse):
                result += members
                continue
            whole = self.like.new_zeros(len(union), len(union))
            dense = len(union) <= _DENSE_UP_TO
            whole = whole if dense else whole.new_zeros(len(union))
            parts = inverse.split([len(own) for own in numbers])
            for (_, block), where in zip(members, parts, strict=True):
                if isinstance(block, Tensor):
                    square = block if block.dim() == 2 else torch.diag(block)
                    part = square if dense else square.diagonal()
                else:
                    part = block.matrix() if dense else block.diagonal()
                if dense:
                    whole[where[:, None], where] += part
                else:
                    whole[where] += part
            result.append((Place((site, -2), union), whole))
        return result

    def diagonal(self) -> Tensor:
        if not self._decomposed:
            self._decompose()
        result = self.like.new_zeros(self.size)
        for module in (*self.products.values(), *self.rest.values()):
            block: Any = module
            result[block.place.positions] += block.diagonal()
        return result


def _varies(values: Tensor) -> bool:
    return bool((values.detach() != values.detach().flatten()[0]).any())


def _in_basis(factors: ProductFactors, diagonal: Tensor) -> Tensor:
    """diag(Q' diag(d) Q) for d (groups, out, in)."""
    if factors.inputs_basis is not None:
        diagonal = torch.einsum("goi,gij->goj", diagonal, factors.inputs_basis.square())
    if factors.outputs_basis is not None:
        diagonal = torch.einsum("goi,gop->gpi", diagonal, factors.outputs_basis.square())
    return diagonal


def _couples(prior: PriorPrecision, place: Place) -> bool:
    """Whether the prior of a place's numbers is a matrix, not only a diagonal."""
    if prior.indices is None:
        return False
    block = prior.within(place.positions)
    return not torch.equal(block, torch.diag(block.diagonal()))


def _turned_diagonal(factors: ProductFactors, matrix: Tensor) -> Tensor:
    """diag(Q' matrix Q) for Q = outputs kron inputs, (groups, out, in)."""
    groups, outputs, inputs = factors.shape
    size = outputs * inputs
    result = []
    for g in range(groups):
        part = matrix[g * size : (g + 1) * size, g * size : (g + 1) * size]
        left, right = (
            torch.eye(n, dtype=matrix.dtype, device=matrix.device) if basis is None else basis[g]
            for n, basis in ((outputs, factors.outputs_basis), (inputs, factors.inputs_basis))
        )
        basis = torch.kron(left.contiguous(), right.contiguous()).to(matrix)
        result.append(((part @ basis) * basis).sum(0).reshape(outputs, inputs))
    return torch.stack(result)


def _rest_precision(values: Tensor, prior: PriorPrecision, place: Place) -> Precision:
    if values.dim() == 2 and _couples(prior, place):
        block = prior.within(place.positions).to(values)
        if not torch.linalg.cholesky_ex(block)[1]:  # a hierarchical prior's may be indefinite
            return FullPrecision(values + block)
    added = prior.diagonal[place.positions].to(values)
    if values.dim() == 1:
        return DiagonalPrecision(values + added)
    return FullPrecision(values + torch.diag(added))

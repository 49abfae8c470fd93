"""Kronecker-factored curvature: KFAC, and its eigenvalue-corrected form EKFAC.

For a product z_t = W a_t the block of W in sum_n J_n' J_n is approximated by (1/R) (sum a a') kron
(sum g g'). In the "expand" form the sums run over data, positions t and columns, and R is the
number of data times the number of positions. In the "reduce" form a is averaged and g is summed
over the positions, and R is the number of data. Both are exact for one datum with one position.

If the vectors are fewer than half of a factor's size, as for many inputs and few data, they are
stored instead of the factor. Directions outside their span have exactly the prior precision
(``outer_products.py``, ``eigenbasis.py``). Latents outside products have exact blocks, dense up to
1024 numbers and diagonal beyond. Blocks of different sites are independent.

Sources: Martens & Grosse 2015; Grosse & Martens 2016 for convolutions; Eschenhagen et al. 2023 for
expand and reduce; George et al. 2018 for EKFAC.
"""

import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from pyro_bdl.curvature.jacobian.block_position import BlockPosition
from pyro_bdl.curvature.jacobian.jacobian import (
    Block,
    DenseBlock,
    Jacobian,
    LookupBlock,
    ProductBlock,
)
from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.curvature.structures.base import Curvature, Precision, StructureOptions
from pyro_bdl.curvature.structures.diagonal import DiagonalPrecision
from pyro_bdl.curvature.structures.full import FullPrecision
from pyro_bdl.curvature.structures.kron.eigen_precision import EigenPrecision
from pyro_bdl.curvature.structures.kron.factors import KroneckerFactors, output_vectors
from pyro_bdl.curvature.structures.kron.outer_products import OuterVectors, collect, decompose
from pyro_bdl.curvature.structures.kron.precision import KroneckerPrecision
from pyro_bdl.errors import BdlWarning
from pyro_bdl.program.subset import Subset
from pyro_bdl.utils.collectives import Ranks
from pyro_bdl.utils.linear_algebra import widened

_DENSE_UP_TO = 1024


class ExactBlock(nn.Module):
    """Exact curvature of latents outside products: a matrix, or its diagonal if it is large."""

    values: Tensor

    def __init__(self, position: BlockPosition, size: int, like: Tensor) -> None:
        super().__init__()
        self.position = position
        shape = (size, size) if size <= _DENSE_UP_TO else (size,)
        self.register_buffer("values", widened(like, size).new_zeros(shape))

    def add(self, block: Block) -> None:
        rows = block.rows().flatten(0, 1).to(self.values)
        self.values += rows.mT @ rows if self.values.dim() == 2 else rows.square().sum(0)

    def diagonal(self) -> Tensor:
        return self.values.diagonal() if self.values.dim() == 2 else self.values


class KroneckerCurvature(Curvature):
    """Kronecker factors of every product, and exact blocks of other latents.

    :param reduce: average inputs and sum gradients over positions, instead of treating every
        position as a separate datum.
    :param networks: sites of plates of networks; a warning names those without Kronecker factors.
    """

    takes_softmax = True
    like: Tensor

    def __init__(
        self,
        size: int,
        like: Tensor,
        *,
        reduce: bool = False,
        networks: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.size, self.reduce, self.networks = size, reduce, frozenset(networks)
        self.register_buffer("like", like.new_zeros(0), persistent=False)
        self.products: Any = nn.ModuleDict()
        self.rest: Any = nn.ModuleDict()
        self._names: dict[tuple[str, int], str] = {}
        self._seen: set[tuple[tuple[str, int], tuple[int, ...]]] = set()
        self._rotated: dict[Any, Any] = {}
        self._pass = 0

    @classmethod
    def empty(
        cls, subset: Subset, like: Tensor, options: StructureOptions, before: Self | None
    ) -> Self:
        return cls(subset.size, like, reduce=options.reduce, networks=_networks(subset))

    @classmethod
    def memory(cls, size: int, options: StructureOptions, num_rows: int = 0) -> int:
        return 0

    @classmethod
    def numbers_per_gradient(cls, size: int, largest_shared: int) -> int:
        return 0

    # Accumulation

    def end_batch(self) -> None:
        self._seen.clear()
        self._rotated.clear()

    def add(self, jacobian: Jacobian) -> None:
        users = Counter(id(b.gradients) for b in jacobian.blocks if not isinstance(b, DenseBlock))
        outputs: dict[int, OuterVectors] = {}  # gradients that a weight and a bias share
        for block in jacobian.blocks:
            if block.position.chosen is not None:
                raise ValueError(
                    f"a subset of the entries of site '{block.position.key[0]}' has no Kronecker "
                    'factors: choose whole sites, or structure="full", "diag" or "low_rank"'
                )
            if isinstance(block, DenseBlock):
                if self._pass == 0:
                    self._rest(block).add(block)
                continue
            factors = self._factors(block)
            origin = block.position.key, block.position.uses
            if self._pass == 1:
                rotated = factors.basis().rotated(block)
                if isinstance(rotated, ProductBlock):  # other columns have the same inputs
                    rotated = replace(
                        rotated, source=self._rotated.setdefault(origin, rotated.source)
                    )
                factors.corrected += rotated.squares()
                continue
            if origin not in self._seen:
                self._seen.add(origin)
                factors.add_inputs(block, reduce=self.reduce)
            own = id(block.gradients)
            if own not in outputs:
                reused = users[own] > 1
                outputs[own] = output_vectors(block, reduce=self.reduce, reused=reused)
            factors.outputs.add(outputs[own])

    def _factors(self, block: ProductBlock | LookupBlock) -> Any:
        key = block.position.key
        if key not in self._names:
            self._names[key] = f"product{len(self.products)}"
            self.products[self._names[key]] = KroneckerFactors(
                block.position, block.shape, self.like, lookup=isinstance(block, LookupBlock)
            )
        return self.products[self._names[key]]

    def _rest(self, block: DenseBlock) -> Any:
        key = block.position.key
        if key not in self._names:
            if key[0] in self.networks:
                warnings.warn(
                    f"the weights '{key[0]}' of a plate of networks have no Kronecker factors: "
                    f"they get one exact block, or above {_DENSE_UP_TO} numbers its diagonal; let "
                    "the first dimension of the targets number the data, and another the networks",
                    BdlWarning,
                    stacklevel=2,
                )
            self._names[key] = f"rest{len(self.rest)}"
            self.rest[self._names[key]] = ExactBlock(block.position, block.position.size, self.like)
        return self.rest[self._names[key]]

    def sums(self) -> list[Tensor]:
        """The sums of the pass besides those of outer products."""
        result: list[Tensor] = []
        for name in self._in_order():
            if name in self.products:
                factors: Any = self.products[name]
                result += factors.counts() if self._pass == 0 else [factors.corrected]
            elif self._pass == 0:
                result.append(self.rest[name].values)
        return result

    def add_up(self, ranks: Ranks) -> None:
        matrices: list[Tensor] = []
        if self._pass == 0:
            products: list[Any] = [self.products[n] for n in self._in_order() if n in self.products]
            matrices = collect([sums for factors in products for sums in factors.sums()], ranks)
        ranks.add_up([*matrices, *self.sums()])

    def _in_order(self) -> list[str]:
        """The names of products and rest, in the same order on all ranks."""
        return [self._names[key] for key in sorted(self._names)]

    def scale(self, factor: float) -> None:
        for factors in self.products.values():
            factors.scale(factor)
        for block in self.rest.values():
            block.values *= factor

    def merge(self, other: Self) -> None:
        for key, name in other._names.items():
            theirs: Any = (other.products if name in other.products else other.rest)[name]
            if key not in self._names:
                kind = "product" if name in other.products else "rest"
                table = self.products if kind == "product" else self.rest
                self._names[key] = f"{kind}{len(table)}"
                table[self._names[key]] = theirs
                continue
            mine: Any = (self.products if name in other.products else self.rest)[self._names[key]]
            if isinstance(mine, ExactBlock):
                mine.values += theirs.values
            else:
                mine.merge(theirs)

    def _decompose(self) -> None:
        decompose([sums for factors in self.products.values() for sums in factors.sums()])

    # Algebra

    def spectra(self, groups: Sequence[Mapping[str, slice]]) -> list[Tensor]:
        self._decompose()
        known: dict[str, list[Tensor]] = {}
        for position, block in self._blocks():
            if not isinstance(block, Tensor):
                values = block.spectrum().flatten()
            elif block.dim() == 2:
                values = torch.linalg.eigvalsh(block.double()).clamp(min=0.0).to(block)
            else:
                values = block
            known.setdefault(position.key[0], []).append(values)
        result = []
        for group in groups:
            found = torch.cat(
                [value for site in group for value in known.get(site, [])] or [self.like]
            )
            size = sum(part.stop - part.start for part in group.values())
            result.append(nn.functional.pad(found, (0, size - len(found))))
        return result

    def with_prior(self, prior: PriorPrecision, factor: Tensor | float = 1.0) -> KroneckerPrecision:
        """Return factor times this curvature, plus the prior's.

        Of a prior that varies within a product, only the diagonal in the product's eigenbasis is
        used. Of a prior that couples sites, only the blocks of the sites are used.
        """
        self._decompose()
        blocks: list[tuple[BlockPosition, Any]] = []
        covered = torch.zeros(self.size, dtype=torch.bool, device="cpu")
        for position, block in self._blocks():
            where = position.indices
            covered[where if isinstance(where, slice) else where.to(covered.device)] = True
            if isinstance(block, Tensor):
                blocks.append((position, _rest_precision(block * factor, prior, position)))
                continue
            blocks.append((position, _product_precision(block, prior, factor)))
        left = (~covered).nonzero()[:, 0].to(self.like.device)
        if len(left):
            position, zero = BlockPosition(("", 0), left), self.like.new_zeros(len(left))
            blocks.append((position, _rest_precision(zero, prior, position)))
        return KroneckerPrecision(self.size, blocks, self.like)

    def _blocks(self) -> list[tuple[BlockPosition, Any]]:
        """Return blocks over disjoint latents: products, and exact matrices or diagonals.

        Blocks of a site that share entries are summed into one block.
        """
        by_site: dict[str, list[tuple[BlockPosition, Any]]] = {}
        for module in (*self.products.values(), *self.rest.values()):
            block: Any = module
            value = block.values if isinstance(block, ExactBlock) else block
            by_site.setdefault(block.position.key[0], []).append((block.position, value))
        result = []
        for site, members in by_site.items():
            if len(members) == 1:
                result += members
                continue
            numbers = [position.index_tensor(self.like.device) for position, _ in members]
            union, inverse = torch.cat(numbers).unique(return_inverse=True)
            if len(union) == len(inverse):
                result += members
                continue
            dense = len(union) <= _DENSE_UP_TO
            shape = (len(union), len(union)) if dense else (len(union),)
            whole = widened(self.like, len(union)).new_zeros(shape)
            parts = inverse.split([len(own) for own in numbers])
            for (_, block), where in zip(members, parts, strict=True):
                if isinstance(block, Tensor):
                    square = block if block.dim() == 2 else torch.diag(block)
                    part = square if dense else square.diagonal()
                else:
                    part = block.matrix() if dense else block.diagonal()
                if dense:
                    whole[where[:, None], where] += part.to(whole)
                else:
                    whole[where] += part.to(whole)
            result.append((BlockPosition((site, -2), union), whole))
        return result

    def diagonal(self) -> Tensor:
        self._decompose()
        result = self.like.new_zeros(self.size)
        for module in (*self.products.values(), *self.rest.values()):
            block: Any = module
            result[block.position.indices] += block.diagonal().to(result)
        return result


class EKFACCurvature(KroneckerCurvature):
    """Kronecker factors with corrected eigenvalues.

    A second pass over the data replaces the products of eigenvalues by the gradients' second
    moments in the eigenbasis (George et al. 2018).

    :param start: a curvature of earlier data that this one will be merged into; its eigenbases
        are then used.
    """

    passes = 2

    def __init__(
        self,
        size: int,
        like: Tensor,
        *,
        reduce: bool = False,
        networks: Collection[str] = (),
        start: Self | None = None,
    ) -> None:
        super().__init__(size, like, reduce=reduce, networks=networks)
        self._earlier: dict[tuple[str, int], Any] = {}  # products of earlier data
        if start is not None:
            products = start.products
            known = {key: name for key, name in start._names.items() if name in products}
            self._earlier = {key: products[name] for key, name in known.items()}

    @classmethod
    def empty(
        cls, subset: Subset, like: Tensor, options: StructureOptions, before: Self | None
    ) -> Self:
        networks = _networks(subset)
        return cls(subset.size, like, reduce=options.reduce, networks=networks, start=before)

    @classmethod
    def numbers_per_gradient(cls, size: int, largest_shared: int) -> int:
        return largest_shared

    def start_pass(self, number: int) -> None:
        self._pass = number
        if number == 0:
            return
        self._decompose()
        for key, name in self._names.items():
            if name in self.products:
                self.products[name].correct(self._earlier.get(key))
        self._earlier = {}


def _networks(subset: Subset) -> set[str]:
    """The weight matrices in plates."""
    latents = subset.layout.latents
    return {name for name in subset.parts if latents[name].plates and latents[name].event_dim > 1}


def _product_precision(
    factors: KroneckerFactors, prior: PriorPrecision, factor: Tensor | float
) -> EigenPrecision:
    position, values, basis = factors.position, factors.spectrum() * factor, factors.basis()
    coupled = prior.couples(position.indices)
    one = None if coupled else _one_number(prior, position)
    if one is not None:
        one = one.to(values)
        return EigenPrecision(position, basis, values + one, None if basis.complete else one)
    added = prior.diagonal[position.indices].to(values)
    basis = factors.complete_basis()
    if coupled:
        added = basis.rotated_matrix_diagonal(prior.within(position.indices).to(values))
    else:
        added = basis.rotated_diagonal(added.reshape(factors.shape))
    return EigenPrecision(position, basis, basis.padded(values) + added, None)


def _one_number(prior: PriorPrecision, position: BlockPosition) -> Tensor | None:
    """Return the prior precision of all entries of a weight if it is one number, and stays one
    when the parameters behind it change."""
    if position.key[0] in prior.uniform:
        return prior.uniform[position.key[0]]
    added = prior.diagonal[position.indices]
    if added.requires_grad or bool((added != added[0]).any()):
        return None
    return added[0]


def _rest_precision(values: Tensor, prior: PriorPrecision, position: BlockPosition) -> Precision:
    added = prior.diagonal[position.indices].to(values)
    if values.dim() == 1:
        return DiagonalPrecision((values + added).to(prior.diagonal))
    matrix = values + torch.diag(added)
    if prior.couples(position.indices):
        block = prior.within(position.indices).to(values)
        if not torch.linalg.cholesky_ex(block)[1]:  # may be indefinite for hierarchical priors
            matrix = values + block
    return FullPrecision(matrix, dtype=prior.diagonal.dtype)

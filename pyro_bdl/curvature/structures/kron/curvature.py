"""Kronecker-factored curvature: KFAC, and its eigenvalue-corrected form EKFAC.

For a product z_t = W a_t the block of W in sum_n J_n' J_n is approximated by (1/R) (sum a a') kron
(sum g g'). In the "expand" form the sums run over data, positions t and columns, and R is the
number of data times the number of positions. In the "reduce" form a is averaged and g is summed
over the positions, and R is the number of data. Both are exact for one datum with one position.

If the vectors are fewer than half of a factor's size, as for many inputs and few data, they are
stored instead of the factor. Directions outside their span have exactly the prior precision.
Latents outside products have exact blocks, dense up to 1024
numbers and diagonal beyond. Blocks of different sites are independent.

Sources: Martens & Grosse 2015; Grosse & Martens 2016 for convolutions; Eschenhagen et al. 2023 for
expand and reduce; George et al. 2018 for EKFAC.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from pyro_bdl.curvature.jacobian.jacobian import (
    Block,
    BlockPosition,
    DenseBlock,
    Jacobian,
    LookupBlock,
    ProductBlock,
)
from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.curvature.structures.base import (
    Curvature,
    Precision,
    Structure,
    beside,
    named,
)
from pyro_bdl.curvature.structures.diagonal import DiagonalPrecision
from pyro_bdl.curvature.structures.full import FullPrecision
from pyro_bdl.curvature.structures.kron.factors import (
    Outer,
    WeightFactors,
    decompose,
    gradients_of,
)
from pyro_bdl.curvature.structures.kron.precision import KroneckerPrecision
from pyro_bdl.errors import warn
from pyro_bdl.program.subset import Subset
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.collectives import Ranks
from pyro_bdl.utils.linear_algebra import widened
from pyro_bdl.utils.precision import double

_DENSE_UP_TO = 1024


class ExactBlock(nn.Module):
    """Exact curvature of latents outside products: a matrix, or its diagonal if it is large."""

    values: Tensor

    def __init__(self, position: BlockPosition, like: Tensor) -> None:
        super().__init__()
        self.position, size = position, position.size
        shape = (size, size) if size <= _DENSE_UP_TO else (size,)
        self.register_buffer("values", widened(like, size).new_zeros(shape))

    def add(self, block: Block) -> None:
        rows = block.rows().flatten(0, 1).to(self.values)
        self.values += rows.mT @ rows if self.values.dim() == 2 else rows.square().sum(0)

    def add_at(self, where: Tensor, block: "ExactBlock | WeightFactors") -> None:
        """Add a block over some of these latents."""
        if self.values.dim() == 1:
            self.values[where] += block.diagonal().to(self.values)
        else:
            self.values[where[:, None], where] += block.matrix().to(self.values)

    def diagonal(self) -> Tensor:
        return self.values.diagonal() if self.values.dim() == 2 else self.values

    def matrix(self) -> Tensor:
        return self.values if self.values.dim() == 2 else torch.diag(self.values)

    def spectrum(self) -> Tensor:
        if self.values.dim() == 1:
            return self.values
        return torch.linalg.eigvalsh(double(self.values)).clamp(min=0.0).to(self.values)

    def with_prior(self, prior: PriorPrecision, factor: Tensor | float) -> Precision:
        where, values = self.position.indices, self.values * beside(factor, self.values)
        added = prior.diagonal[where].to(values)
        if values.dim() == 1:
            return DiagonalPrecision((values + added).to(prior.diagonal))
        matrix = values + torch.diag(added)
        if prior.couples(where):
            block = prior.within(where).to(values)
            if not torch.linalg.cholesky_ex(block)[1]:  # may be indefinite for hierarchical priors
                matrix = values + block
        return FullPrecision(matrix, like=prior.diagonal)

    def sums(self, number: int) -> list[Tensor]:
        """The sums of a pass over the data."""
        return [] if number else [self.values]

    def scale(self, number: float) -> None:
        self.values *= number

    def add_earlier(self, earlier: "ExactBlock") -> None:
        self.values += earlier.values


class KroneckerCurvature(Curvature):
    """Kronecker factors of every product, and exact blocks of other latents.

    :param reduce: average inputs and sum gradients over positions, instead of treating every
        position as a separate datum.
    """

    takes_softmax = True
    takes_single_rows = True
    makes: ClassVar[Literal["rows", "entries", "factors"]] = "factors"
    like: Tensor

    def __init__(self, subset: Subset, like: Tensor, *, reduce: bool = False) -> None:
        super().__init__()
        for name, entries in subset.chosen.items():
            if entries is not None:
                raise ValueError(
                    f"a subset of the entries of site '{name}' has no Kronecker factors: choose "
                    'whole sites, or structure="full", "diag" or "low_rank"'
                )
        self.size, self.sites, self.reduce = subset.size, subset.parts, reduce
        latents = subset.layout.latents
        self.networks = {n for n in self.sites if latents[n].plates and latents[n].event_dim > 1}
        self.register_buffer("like", like.new_zeros(0), persistent=False)
        self.parts: Any = nn.ModuleDict()  # WeightFactors and ExactBlocks
        self._names: dict[tuple[str, int], str] = {}  # of the parts
        self._seen: set[tuple[tuple[str, int], tuple[int, ...]]] = set()
        self._rotated: dict[Any, Any] = {}
        self._pass = 0

    # Accumulation

    def end_batch(self) -> None:
        self._seen.clear()
        self._rotated.clear()

    def add(self, jacobian: Jacobian) -> None:
        vectors: dict[int, Outer] = {}  # a weight and a bias share their gradients
        for block in jacobian.blocks:
            part = self._part(block)
            if isinstance(block, DenseBlock):
                if self._pass == 0:
                    part.add(block)
                continue
            origin = block.position.key, block.position.uses  # other columns have the same inputs
            if self._pass == 1:
                rotated: Any = part.block().split(block)[0]
                if isinstance(rotated, ProductBlock):
                    source = self._rotated.setdefault(origin, rotated.source)
                    rotated = replace(rotated, source=source)
                part.corrected += rotated.squares()
                continue
            if origin not in self._seen:
                self._seen.add(origin)
                part.add_inputs(block, reduce=self.reduce)
            own = id(block.gradients)
            if own not in vectors:
                vectors[own] = gradients_of(block, reduce=self.reduce)
            part.outputs.add(vectors[own])

    def _part(self, block: Block) -> Any:
        key = block.position.key
        if key in self._names:
            return self.parts[self._names[key]]
        if not isinstance(block, DenseBlock):
            lookup = isinstance(block, LookupBlock)
            part = WeightFactors(block.position, block.shape, self.like, lookup=lookup)
            return self._with_part(key, part)
        if key[0] in self.networks:
            warn(
                f"the weights '{key[0]}' of a plate of networks have no Kronecker factors: "
                f"they get one exact block, or above {_DENSE_UP_TO} numbers its diagonal; let "
                "the first dimension of the targets number the data, and another the networks",
                "plates-of-networks",
            )
        return self._with_part(key, ExactBlock(block.position, self.like))

    def _with_part(self, key: tuple[str, int], part: Any) -> Any:
        self._names[key] = str(len(self.parts))
        self.parts[self._names[key]] = part
        return part

    def plan(self) -> list[dict[str, Any]]:
        found = []
        for (site, use), name in self._names.items():
            part = self.parts[name]
            indices, of_weight = part.position.indices, isinstance(part, WeightFactors)
            found.append(
                {
                    "key": [site, use],
                    "indices": part.position.index_tensor(self.like.device)
                    if not isinstance(indices, slice)
                    else [indices.start, indices.stop],
                    "uses": list(part.position.uses),
                    "shape": list(part.shape) if of_weight else None,
                    "lookup": of_weight and part.inputs is None,
                }
            )
        return found

    def build(self, plan: Any) -> None:
        for saved in plan:
            (site, use), where, shape = saved["key"], saved["indices"], saved["shape"]
            indices = where if isinstance(where, Tensor) else slice(*where)
            position = BlockPosition((site, use), indices, tuple(saved["uses"]))
            part: Any = ExactBlock(position, self.like)
            if shape is not None:
                part = WeightFactors(position, torch.Size(shape), self.like, lookup=saved["lookup"])
            self._with_part((site, use), part)

    @property
    def _in_order(self) -> list[Any]:
        """The parts, in the same order on all ranks."""
        return [self.parts[self._names[key]] for key in sorted(self._names)]

    @property
    def _factors(self) -> list[Any]:
        weights = [part for part in self._in_order if isinstance(part, WeightFactors)]
        return [factor for part in weights for factor in part.factors]

    def sums(self) -> list[Tensor]:
        """The sums of the pass besides those of outer products."""
        return [total for part in self._in_order for total in part.sums(self._pass)]

    def add_up(self, ranks: Ranks) -> None:
        matrices = [f.as_matrix() for f in self._factors] if self._pass == 0 else []
        ranks.add_up([*matrices, *self.sums()])

    def scale(self, factor: float) -> None:
        for part in self.parts.values():
            part.scale(factor)

    def finish(self, before: Self | None) -> Self:
        if before is not None:
            for key, name in before._names.items():
                theirs = before.parts[name]
                if key in self._names:
                    self.parts[self._names[key]].add_earlier(theirs)
                else:
                    self._with_part(key, theirs)
        decompose(self._factors)
        return self

    # Algebra

    def spectra(self, groups: Sequence[Mapping[str, slice]]) -> list[Tensor]:
        known: dict[str, list[Tensor]] = {}
        for part in self._disjoint():
            known.setdefault(part.position.key[0], []).append(part.spectrum().flatten())
        result = []
        for group in groups:
            found = torch.cat([values for site in group for values in known[site]])
            size = sum(part.stop - part.start for part in group.values())
            result.append(nn.functional.pad(found, (0, size - len(found))))
        return result

    def with_prior(self, prior: PriorPrecision, factor: Tensor | float = 1.0) -> KroneckerPrecision:
        """Return factor times this curvature, plus the prior's.

        Of a prior that varies within a product, only the diagonal in the product's eigenbasis is
        used. Of a prior that couples sites, only the blocks of the sites are used.
        """
        blocks = [(part.position, part.with_prior(prior, factor)) for part in self._disjoint()]
        return KroneckerPrecision(self.size, blocks, self.like)

    def _disjoint(self) -> list[Any]:
        """Return parts over disjoint latents that cover all.

        Those of a site that share entries are summed, and latents without curvature have zeros.
        """
        parts, device = list(self.parts.values()), self.like.device
        uses = torch.zeros(self.size, dtype=torch.long, device="cpu")
        for part in parts:
            where = part.position.indices  # slices are not spelled out: millions of numbers
            uses[where if isinstance(where, slice) else where.to(uses.device)] += 1
        for site, place in self.sites.items():
            of_site = uses[place]
            if (of_site > 1).any():
                whole = ExactBlock(BlockPosition((site, -2), place), self.like)
                for part in [part for part in parts if part.position.key[0] == site]:
                    whole.add_at(part.position.index_tensor(device) - place.start, part)
                    parts.remove(part)
                parts.append(whole)
            elif not of_site.all():
                left = (of_site == 0).nonzero()[:, 0].to(device) + place.start
                parts.append(ExactBlock(BlockPosition((site, -2), left), self.like))
        return parts

    def diagonal(self) -> Tensor:
        result = self.like.new_zeros(self.size)
        for part in self.parts.values():
            result[part.position.indices] += part.diagonal().to(result)
        return result


class EKFACCurvature(KroneckerCurvature):
    """Kronecker factors with corrected eigenvalues.

    A second pass over the data replaces the products of eigenvalues by the gradients' second
    moments in the eigenbasis (George et al. 2018).

    :param before: the curvature of earlier data; its eigenbases are then used.
    """

    passes, needs_earlier = 2, True
    makes = "entries"
    takes_softmax = False

    def __init__(
        self, subset: Subset, like: Tensor, *, reduce: bool = False, before: Self | None = None
    ) -> None:
        super().__init__(subset, like, reduce=reduce)
        self._earlier: dict[tuple[str, int], Any] = {}
        if before is not None:
            self._earlier = {key: before.parts[name] for key, name in before._names.items()}

    def start_pass(self, number: int) -> None:
        self._pass = number
        if number == 0:
            return
        decompose(self._factors)
        for key, name in self._names.items():
            if isinstance(self.parts[name], WeightFactors):
                self.parts[name].start_correction(self._earlier.get(key))
        self._earlier = {}


@dataclass(frozen=True)
class Kron(Structure):
    """``structure="kron"``: Kronecker factors of every layer's weights (KFAC).

    It loses the covariance between layers, and a layer's weights get the covariance of its inputs
    times that of its outputs' gradients, each averaged over the data; off the data its standard
    deviations are often too small.

    :param reduce: average inputs and sum gradients over the positions that share weights, instead
        of treating every position as a separate datum.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.KFAC, bibliography.KFAC_LAPLACE)
    reduce: bool = False
    name: str = named("kron")
    curvature: ClassVar = KroneckerCurvature


@dataclass(frozen=True)
class EKFAC(Kron):
    """``structure="ekfac"``: Kronecker factors with corrected eigenvalues, in two passes.

    :param reduce: see ``Kron``.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.KFAC, bibliography.EKFAC)
    name: str = named("ekfac")
    curvature: ClassVar = EKFACCurvature

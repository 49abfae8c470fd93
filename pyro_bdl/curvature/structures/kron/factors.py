"""The Kronecker factors of one weight: sums of outer products of vectors, and their eigenpairs."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_bdl.curvature.jacobian.jacobian import (
    BlockPosition,
    LookupBlock,
    ProductBlock,
    SoftmaxBlock,
)
from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.curvature.structures.base import beside, resize_buffers
from pyro_bdl.curvature.structures.diagonal import check_positive
from pyro_bdl.curvature.structures.kron.precision import KroneckerBlock
from pyro_bdl.utils.linear_algebra import products
from pyro_bdl.utils.memory import require_memory
from pyro_bdl.utils.precision import double

DOUBLE_UP_TO = 1024  # the largest size that is decomposed in float64


class Outer(NamedTuple):
    """Vectors whose outer products are added to a factor.

    :param rows: (groups, R, m); None where only their sum is known.
    :param total: returns the sum of their outer products, (groups, m, m).
    """

    rows: Tensor | None
    total: Callable[[], Tensor]


def outer(x: Tensor) -> Outer:
    """The outer products of vectors x (n, T, groups, m), for data and positions.

    Their sum is computed once, for all factors with these vectors.
    """
    positions, _, size = x.shape[1:]
    if positions > 1 and size <= 2 * positions:
        # Datum by datum, without a copy: patches of images have their positions last in memory.
        groups = x.permute(2, 0, 1, 3)
        return Outer(None, cache(lambda: torch.stack([products(g).sum(0) for g in groups])))
    rows = x.flatten(0, 1).transpose(0, 1)
    return Outer(rows, cache(lambda: products(rows)))


class KroneckerFactor(nn.Module):
    """A = sum_r x_r x_r' over vectors of m numbers, for each of several groups.

    Up to m / 2 vectors are stored as they are, else the matrix. ``decompose`` turns them into
    eigenvalues (groups, r) and orthonormal eigenvectors V (groups, m, r), A = V diag(values) V'.
    Those of stored vectors cover their span only: for 5000 inputs and 1000 data they are 1000.

    :param like: a tensor with the dtype and device.
    :param site: the site's name, for messages.
    """

    values: Tensor | None
    vectors: Tensor | None

    def __init__(self, groups: int, size: int, like: Tensor, site: str) -> None:
        super().__init__()
        self.shape, self.site = (groups, size), site
        self.rows: list[Tensor] = [like.new_zeros(groups, 0, size)]
        self.matrix: Tensor | None = None
        self.register_buffer("values", None)
        self.register_buffer("vectors", None)

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device."""
        found = next((v for v in (self.values, *self.rows) if v is not None), self.matrix)
        assert found is not None
        return found

    # Accumulation

    def add(self, vectors: Outer) -> None:
        rows, count = vectors.rows, sum(rows.shape[1] for rows in self.rows)
        if rows is None or self.matrix is not None or 2 * (count + rows.shape[1]) > self.shape[1]:
            matrix = self.as_matrix()
            matrix += vectors.total()
        else:
            self.rows.append(rows)

    def as_matrix(self) -> Tensor:
        """Return A before its decomposition, (groups, m, m), and store it as a matrix from now on.

        :raises MemoryError: if the matrix or its decomposition does not fit.
        """
        if self.matrix is None:
            self._check_memory()
            self.matrix, self.rows = products(torch.cat(self.rows, 1)), []
        return self.matrix

    def _check_memory(self) -> None:
        (groups, size), like = self.shape, self.rows[0]
        item = like.element_size()
        working = 8 if size <= DOUBLE_UP_TO else item
        # the matrix; its copy in float64 and eigenvectors, and two matrices of LAPACK's workspace
        needed = size**2 * (groups * item + (2 * groups + 2) * working)
        require_memory(
            needed,
            like.device,
            f"the Kronecker factor of {size:,} x {size:,} numbers of the site '{self.site}' and "
            "its decomposition need about",
            'use structure="diag" or "low_rank", or a subset of the latents without that site',
        )

    def scale(self, number: float) -> None:
        """Multiply A by a number that is not negative."""
        self.rows = [rows * number**0.5 for rows in self.rows]
        if self.matrix is not None:
            self.matrix *= number

    def add_decomposed(self, other: "KroneckerFactor") -> None:
        """Add another factor after its decomposition."""
        assert other.values is not None and other.vectors is not None
        roots = other.vectors * other.values.sqrt()[:, None]
        self.add(Outer(roots.mT, lambda: roots @ roots.mT))

    # Eigenpairs

    def decompose(self, *, double_up_to: int = DOUBLE_UP_TO) -> None:
        """Replace A by its eigenpairs.

        :param double_up_to: the largest size that is decomposed in float64, which takes twice the
            time, for six digits instead of three.
        """
        sums = torch.cat(self.rows, 1) if self.matrix is None else self.matrix
        precise = double(sums) if sums.shape[1] <= double_up_to else sums
        if self.matrix is None:  # X' = Q T: the eigenvectors of X'X are Q times those of T T'
            q, t = torch.linalg.qr(precise.mT)
            values, turn = torch.linalg.eigh(t @ t.mT)
            vectors = q @ turn
        else:
            values, vectors = torch.linalg.eigh(precise)
        self.take(values.clamp(min=0.0).to(sums), vectors.to(sums))

    def take(self, values: Tensor | None, vectors: Tensor | None) -> None:
        """Set the eigenpairs."""
        self.values, self.vectors, self.rows, self.matrix = values, vectors, [], None

    def complete(self) -> None:
        """Add directions of eigenvalue zero, until they span all."""
        assert self.values is not None and self.vectors is not None
        size, rank = self.vectors.shape[1:]
        if rank < size:
            q = torch.linalg.qr(self.vectors, mode="complete")[0]
            vectors = torch.cat([self.vectors, q[..., rank:]], -1)
            self.take(nn.functional.pad(self.values, (0, size - rank)), vectors)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if any(prefix + name in state for name in self._buffers):
            resize_buffers(self, ("values", "vectors"), state, prefix, self.like)
        super()._load_from_state_dict(state, prefix, *rest)


class WeightFactors(nn.Module):
    """A = sum a a' and B = sum g g' of one weight, (groups, in, in) and (groups, out, out).

    Its block is (B kron A) / R, with R the number of data, or of data times positions. A look-up in
    a table (rows, features) has a diagonal factor (rows,), the number of look-ups of each row, and
    B over the features.

    :param position: of the weight's blocks.
    :param shape: (groups, out, in), of a table (1, rows, features).
    :param like: a tensor with the dtype and device.
    :param lookup: whether it is a table.
    """

    count: Tensor  # R
    looked_up: Tensor | None
    corrected: Tensor | None  # second moments in the eigenbasis, (groups, s, r)

    def __init__(
        self,
        position: BlockPosition,
        shape: torch.Size,
        like: Tensor,
        *,
        lookup: bool = False,
    ) -> None:
        super().__init__()
        self.position, self.shape = position, shape
        (groups, out, into), site = shape, position.key[0]
        self.register_buffer("count", double(like.new_zeros(())))
        self.register_buffer("looked_up", like.new_zeros(out) if lookup else None)
        self.register_buffer("corrected", None)
        self.inputs = None if lookup else KroneckerFactor(groups, into, like, site)
        self.outputs = KroneckerFactor(groups, into if lookup else out, like, site)

    def add_inputs(self, block: ProductBlock | LookupBlock, *, reduce: bool) -> None:
        if isinstance(block, LookupBlock):
            assert self.looked_up is not None
            self.looked_up += torch.bincount(block.table_rows, minlength=block.num_rows)
            self.count += block.num_data
            return
        assert self.inputs is not None
        positions = 1 if reduce else block.gradients.shape[2]
        number = block.gradients.shape[1] * positions
        self.count += number
        if block.source is None:
            ones = block.gradients.new_full((self.shape[0], 1, 1), float(number))
            self.inputs.add(Outer(None, lambda: ones))
            return
        a = block.source().detach()
        self.inputs.add(outer(a.mean(1, keepdim=True) if reduce else a))

    @property
    def factors(self) -> list[KroneckerFactor]:
        return [factor for factor in (self.inputs, self.outputs) if factor is not None]

    def sums(self, number: int) -> list[Tensor]:
        """The sums of a pass over the data, besides the factors."""
        if number:
            assert self.corrected is not None
            return [self.corrected]
        return [self.count] if self.looked_up is None else [self.count, self.looked_up]

    def start_correction(self, earlier: "WeightFactors | None") -> None:
        """Start to accumulate second moments in the eigenbasis, or in that of earlier data."""
        for mine, theirs in zip(self.factors, earlier.factors if earlier else (), strict=False):
            mine.take(theirs.values, theirs.vectors)
            mine.complete()
        assert self.outputs.vectors is not None
        self.corrected = self.outputs.vectors.new_zeros(self.block().values.shape)

    def add_earlier(self, earlier: "WeightFactors") -> None:
        """Add the factors of earlier data, or their second moments in the same basis."""
        if self.corrected is None:
            for mine, theirs in zip(self.factors, earlier.factors, strict=True):
                mine.add_decomposed(theirs)
        else:
            assert earlier.corrected is not None
            self.corrected += self.block().padded(earlier.corrected)
        for mine_sum, their_sum in zip(self.sums(0), earlier.sums(0), strict=True):
            mine_sum += their_sum

    def scale(self, number: float) -> None:
        if self.corrected is not None:
            self.corrected *= number
        elif number != 1.0:
            self.outputs.scale(number)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        resize_buffers(self, ("corrected",), state, prefix, self.outputs.like)
        super()._load_from_state_dict(state, prefix, *rest)

    # Results

    def block(self) -> KroneckerBlock:
        """The block; each row of a table is a separate direction."""
        sides = [factor.vectors for factor in (self.outputs, self.inputs) if factor is not None]
        outputs, inputs = sides if len(sides) > 1 else (None, sides[0])
        values = self.spectrum()
        return KroneckerBlock(self.shape, outputs, inputs, values, values.new_zeros(()))

    def complete(self) -> None:
        """Complete the basis, for priors that vary between directions."""
        for factor in self.factors:
            factor.complete()
        if self.corrected is not None:
            corrected, self.corrected = self.corrected, None
            self.corrected = self.block().padded(corrected)

    def spectrum(self) -> Tensor:
        """The curvature in the directions of the basis, (groups, s, r); zero in the complement."""
        if self.corrected is not None:
            return self.corrected
        outputs: Any = self.outputs.values
        count = self.count.to(outputs.dtype).clamp(min=1.0)
        if self.inputs is None:
            assert self.looked_up is not None
            return (self.looked_up / count)[None, :, None] * outputs[:, None, :]
        inputs: Any = self.inputs.values
        return outputs[:, :, None] * (inputs / count)[:, None, :]

    def matrix(self) -> Tensor:
        return self.block().matrix()

    def diagonal(self) -> Tensor:
        return self.block().diagonal()

    def with_prior(self, prior: PriorPrecision, factor: Tensor | float) -> KroneckerBlock:
        """Return factor times this curvature, plus the prior's.

        A prior of one number keeps the eigenbasis; else its diagonal in a complete one is used.

        :raises ValueError: if the sum is not positive.
        """
        where = self.position.indices
        coupled = prior.couples(where)
        one = None if coupled else self._one_number(prior)
        if one is None:
            self.complete()
        block = self.block().mapped(lambda values: values * beside(factor, values))
        if one is None:
            added = prior.within(where) if coupled else prior.diagonal[where].reshape(self.shape)
            added = block.rotated_diagonal(added.to(block.values))
            block = replace(block, values=block.values + added)
        else:
            block = block.mapped(lambda values: values + one.to(values))
        for _, values in block.parts():
            check_positive(values, f" of '{self.position.key[0]}'")
        return block

    def _one_number(self, prior: PriorPrecision) -> Tensor | None:
        """Return the prior precision of all entries if it is one number, and stays one when the
        parameters behind it change."""
        if self.position.key[0] in prior.uniform:
            return prior.uniform[self.position.key[0]]
        added = prior.diagonal[self.position.indices]
        if added.requires_grad or bool((added != added[0]).any()):
            return None
        return added[0]


def gradients_of(block: ProductBlock | LookupBlock, *, reduce: bool) -> Outer:
    """The vectors g of a block, whose outer products sum to B."""
    if isinstance(block, SoftmaxBlock):
        return Outer(None, block.moments)
    if isinstance(block, LookupBlock):
        return outer(block.gradients.flatten(0, 1)[:, None, None])
    g = block.gradients.flatten(0, 1)
    return outer(g.sum(1, keepdim=True) if reduce else g)


def decompose(factors: Iterable[KroneckerFactor]) -> None:
    """Decompose factors; equal ones are decomposed once.

    A weight and its bias have the same gradients, and parallel weights have the same inputs.
    """
    done: list[tuple[Tensor, KroneckerFactor]] = []
    for factor in factors:
        if factor.values is not None:
            continue
        sums = torch.cat(factor.rows, 1) if factor.matrix is None else factor.matrix
        twin = next((other for known, other in done if torch.equal(known, sums)), None)
        if twin is None:
            factor.decompose()
            done.append((sums, factor))
        else:
            factor.take(twin.values, twin.vectors)

"""Sums of outer products, sum_r x_r x_r', and their eigenvectors."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bdl.curvature.structures.kron.eigenbasis import completed, extended
from pyro_bdl.utils.collectives import Ranks
from pyro_bdl.utils.linear_algebra import add_products, products
from pyro_bdl.utils.memory import available_memory

DOUBLE_UP_TO = 1024  # the largest size that is decomposed in float64
_NEVER_TOO_LARGE = 2**26  # bytes


def memory_of_decomposition(size: int, item: int, groups: int = 1) -> int:
    """The bytes that the decomposition of matrices (groups, m, m) takes while it runs.

    They are a copy in float64, the eigenvectors, and two matrices of LAPACK's workspace.

    :param size: m.
    :param item: the bytes of a number.
    """
    working = 8 if size <= DOUBLE_UP_TO else item
    return (2 * groups + 2) * size**2 * working


class OuterVectors:
    """Vectors whose outer products are added to a sum.

    :param x: (n, T, groups, m), for data and positions.
    :param total: the sum of their outer products, (groups, m, m), instead of ``x``.
    :param reused: whether several sums use them; the products are then computed once and kept.
    """

    def __init__(
        self, x: Tensor | None = None, *, total: Tensor | None = None, reused: bool = False
    ) -> None:
        self.x, self.given, self.reused = x, total, reused

    @property
    def count(self) -> int | None:
        """The number of vectors in each group; None if only the sum is known."""
        return None if self.x is None else self.x.shape[0] * self.x.shape[1]

    def rows(self) -> Tensor:
        """Return the vectors as (groups, count, m)."""
        assert self.x is not None
        return self.x.flatten(0, 1).transpose(0, 1)

    @cached_property
    def total(self) -> Tensor:
        """The sum of the outer products, (groups, m, m)."""
        if self.given is not None:
            return self.given
        if not self._features_first:
            return products(self.rows())
        assert self.x is not None
        return torch.stack([products(part).sum(0) for part in self.x.permute(2, 0, 1, 3)])

    @property
    def _features_first(self) -> bool:
        """True if products datum by datum are cheaper than a copy with positions first.

        They are for convolutions, which have many positions, and features before positions in
        memory.
        """
        if self.x is None:
            return False
        positions, size = self.x.shape[1], self.x.shape[3]
        return positions > 1 and size <= 2 * positions

    def add_to(self, sums: Tensor) -> None:
        """Add the outer products to sums (groups, m, m) in place."""
        if self.x is None or self.reused or len(sums) > 1 or self._features_first:
            sums += self.total
        else:
            add_products(sums[0], self.rows()[0])


class OuterProductSum(nn.Module):
    """The sum A = sum_r x_r x_r' over vectors of m numbers, for each of several groups.

    Up to m / 2 vectors are stored as they are, else the matrix. The decomposition is A = V
    diag(values) V' with eigenvectors V (m, r); for stored vectors V only covers their span. After
    the decomposition only values and V are kept.

    :param like: a tensor with the dtype and device.
    :param site: the site's name, for messages.
    """

    rows: Tensor | None  # (groups, R or more, m), zeros after the first R
    matrix: Tensor | None  # (groups, m, m)
    values: Tensor | None  # (groups, r)
    vectors: Tensor | None  # (groups, m, r)

    def __init__(self, groups: int, size: int, like: Tensor, *, site: str = "") -> None:
        super().__init__()
        self.site = site
        self.register_buffer("rows", like.new_zeros(groups, 0, size))
        self.shape = groups, size
        self.count = 0  # R
        for name in ("matrix", "values", "vectors"):
            self.register_buffer(name, None)

    # Accumulation

    def add(self, vectors: OuterVectors) -> None:
        self._compose()
        if self._has_room(vectors.count):
            self._append(vectors.rows())
        else:
            vectors.add_to(self.as_matrix())

    def gather_rows(self, counts: Sequence[int], ranks: Ranks) -> bool:
        """Store the vectors of all ranks, if they are few enough together.

        :param counts: R of each rank; each has stored its vectors.
        :returns: whether they are few enough.
        """
        assert self.rows is not None
        size = self.rows.shape[2]
        if sum(counts) > size // 2:
            return False
        padded = self.rows.new_zeros(len(self.rows), max(counts), size)
        padded[:, : self.count] = self.rows[:, : self.count]
        found = zip(ranks.stack(padded), counts, strict=True)
        self.rows = torch.cat([rows[:, :count] for rows, count in found], 1)
        self.count = sum(counts)
        return True

    def merge(self, other: "OuterProductSum") -> None:
        """Add another sum, which is not changed."""
        other._compose()
        if other.rows is None:
            self.add(OuterVectors(total=other.matrix))
        else:
            self.add(OuterVectors(other.rows[:, : other.count].transpose(0, 1)[:, None]))

    def scale(self, factor: float) -> None:
        """Multiply the sum by a nonnegative factor."""
        self._compose()
        if self.rows is not None:
            self.rows *= factor**0.5
        else:
            self.as_matrix().mul_(factor)

    def _has_room(self, count: int | None) -> bool:
        if count is None or self.rows is None:
            return False
        return self.count + count <= self.rows.shape[2] // 2

    def _append(self, rows: Tensor) -> None:
        assert self.rows is not None
        groups, room, size = self.rows.shape
        end = self.count + rows.shape[1]
        if end > room:  # double the room, so that copies cost no more than the rows
            longer = self.rows.new_zeros(groups, min(max(end, 2 * room), size // 2), size)
            longer[:, : self.count] = self.rows[:, : self.count]
            self.rows = longer
        self.rows[:, self.count : end] = rows
        self.count = end

    def as_matrix(self) -> Tensor:
        """Return A (groups, m, m) before its decomposition; it is stored as a matrix from now
        on.

        :raises MemoryError: if the matrix or its decomposition does not fit.
        """
        if self.matrix is None:
            assert self.rows is not None
            self._check_memory(self.rows)
            self.matrix, self.rows, self.count = products(self.rows[:, : self.count]), None, 0
        return self.matrix

    def _check_memory(self, like: Tensor) -> None:
        groups, size = self.shape
        needed = groups * size**2 * like.element_size()
        needed += memory_of_decomposition(size, like.element_size(), groups)
        free = available_memory(like.device) if needed > _NEVER_TOO_LARGE else None
        if free is not None and needed > free:
            raise MemoryError(
                f"the Kronecker factor of {size:,} x {size:,} numbers of the site '{self.site}' "
                f"needs about {needed / 2**30:.1f} GiB with its decomposition, "
                f'{free / 2**30:.1f} GiB are free: use structure="diag" or "low_rank", or a subset '
                "of the latents without that site"
            )

    def _compose(self) -> None:
        """Turn eigenvectors and eigenvalues back into a sum."""
        if self.vectors is None or self.values is None:
            return
        roots = self.vectors * self.values.sqrt()[:, None]
        self.values = self.vectors = None
        if 2 * roots.shape[2] <= roots.shape[1]:
            self.rows, self.count = roots.mT.contiguous(), roots.shape[2]
        else:
            self.matrix = roots @ roots.mT

    # Results

    def dense(self) -> Tensor:
        """Return A, (groups, m, m)."""
        if self.vectors is not None and self.values is not None:
            return (self.vectors * self.values[:, None]) @ self.vectors.mT
        if self.rows is not None:
            return products(self.rows[:, : self.count])
        return self.as_matrix()

    def eigen(self, *, double_up_to: int = DOUBLE_UP_TO) -> tuple[Tensor, Tensor]:
        """Return eigenvalues (groups, r) and orthonormal eigenvectors (groups, m, r).

        If r < m, the other eigenvalues are zero.

        :param double_up_to: the largest size that is decomposed in float64, which takes twice the
            time, for six digits instead of three.
        """
        if self.vectors is None or self.values is None:
            if self.rows is not None:
                found = _eigen_of_rows(self.rows[:, : self.count], double_up_to)
            else:
                found = _eigen(self.as_matrix(), double_up_to)
            self.take(*found)
            return found
        return self.values, self.vectors

    def extend(self, other: "OuterProductSum") -> None:
        """Add directions with eigenvalue zero, so that the eigenvectors also span another sum's."""
        self._lengthen(extended(self.eigen()[1], other.eigen()[1].mT))

    def complete(self) -> None:
        """Add directions with eigenvalue zero until there are m."""
        self._lengthen(completed(self.eigen()[1]))

    def _lengthen(self, vectors: Tensor) -> None:
        values = self.eigen()[0]
        self.take(nn.functional.pad(values, (0, vectors.shape[2] - values.shape[1])), vectors)

    def take(self, values: Tensor, vectors: Tensor) -> None:
        """Set the eigenvalues and eigenvectors."""
        self.values, self.vectors = values, vectors
        self.rows, self.matrix, self.count = None, None, 0

    def _equals(self, other: "OuterProductSum") -> bool:
        """Return whether both, before their decomposition, are the same sum."""
        if self.count != other.count or (self.rows is None) != (other.rows is None):
            return False
        mine, theirs = (m.rows if m.rows is not None else m.as_matrix() for m in (self, other))
        same = mine.shape == theirs.shape and torch.equal(mine[:, :1], theirs[:, :1])
        return same and torch.equal(mine, theirs)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if any(prefix + name in state for name in self._buffers):
            make_room(self, tuple(self._buffers), state, prefix, next(self.buffers()))
        super()._load_from_state_dict(state, prefix, *rest)
        self.count = 0 if self.rows is None else self.rows.shape[1]


def make_room(
    module: nn.Module, names: tuple[str, ...], state: Any, prefix: str, like: Tensor
) -> None:
    """Resize a module's buffers to those in a state, since their shapes depend on the data."""
    for name in names:
        value = state.get(prefix + name)
        setattr(module, name, None if value is None else like.new_empty(value.shape))


def collect(sums: Sequence[OuterProductSum], ranks: Ranks) -> list[Tensor]:
    """Give every rank the stored vectors of all ranks, for the sums where these are few together.

    :returns: the matrices of the other sums, which are left to add up over the ranks.
    """
    shapes = [own.shape for own in sums]
    counts = [None if own.rows is None else own.count for own in sums]
    found = ranks.gather((shapes, counts))
    if any(theirs != shapes for theirs, _ in found):
        return [own.as_matrix() for own in sums]  # adding them up tells which rank differs
    of_ranks = zip(*(numbers for _, numbers in found), strict=True)
    return [
        own.as_matrix()
        for own, numbers in zip(sums, of_ranks, strict=True)
        if None in numbers or not own.gather_rows(numbers, ranks)
    ]


def decompose(sums: Iterable[OuterProductSum]) -> None:
    """Decompose sums; equal sums are decomposed once.

    A weight and its bias have the same gradients, and parallel weights have the same inputs.
    """
    alike: list[list[OuterProductSum]] = []
    for own in sums:
        if own.vectors is None:
            found = next((group for group in alike if own._equals(group[0])), None)
            if found is None:
                alike.append([own])
            else:
                found.append(own)
    for first, *others in alike:
        values, vectors = first.eigen()
        for other in others:
            other.take(values, vectors)


def _eigen(matrix: Tensor, double_up_to: int) -> tuple[Tensor, Tensor]:
    precise = matrix.double() if matrix.shape[-1] <= double_up_to else matrix
    values, vectors = torch.linalg.eigh(precise)
    return values.clamp(min=0.0).to(matrix), vectors.to(matrix)


def _eigen_of_rows(rows: Tensor, double_up_to: int) -> tuple[Tensor, Tensor]:
    """Return the eigenpairs of X'X for X (groups, R, m).

    With X' = Q T, the eigenvectors are Q times those of T T'.
    """
    precise = rows.double() if rows.shape[1] <= double_up_to else rows
    q, t = torch.linalg.qr(precise.mT)
    values, turn = torch.linalg.eigh(t @ t.mT)
    return values.clamp(min=0.0).to(rows), (q @ turn).to(rows)

"""The protocols of a curvature structure.

A structure is one file with three classes. A ``Structure`` holds its options. The ``Curvature``
that it makes sums Jacobians over the data in a compressed form. ``Curvature.with_prior`` adds the
prior precision and returns a ``Precision``, the Gaussian's inverse covariance with its algebra.
``structures/__init__.py`` lists the structures by name; code outside a structure's file does not
depend on the structure.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor, nn

from pyro_bdl.curvature.jacobian.jacobian import (
    BlockPosition,
    DenseBlock,
    Jacobian,
    joint_gram,
)
from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.program.subset import Subset
from pyro_bdl.utils.collectives import Ranks


@dataclass(frozen=True)
class Structure(ABC):
    """The choice of a structure, with its options; a string stands for it with their defaults.

    ``curvature`` is the class that it makes, whose fields say what the passes over data need.
    """

    papers: ClassVar[tuple[str, ...]] = ()
    name: str = field(init=False, repr=False)
    curvature: ClassVar[type["Curvature"]]

    def empty(self, subset: Subset, like: Tensor, before: Any) -> "Curvature":
        """Return a curvature over no data yet; by default the class gets the options by name.

        :param subset: the latents; ``subset.parts`` are the sites' slices.
        :param like: a tensor with the dtype and device.
        :param before: the curvature of earlier data, which ``finish`` gets as well; or None.
        """
        made: Any = self.curvature
        options = {
            option.name: getattr(self, option.name) for option in fields(self) if option.init
        }
        return made(subset, like, **options, **({"before": before} if made.needs_earlier else {}))

    def memory(self, size: int, like: Tensor, num_rows: int = 0) -> int:
        """The bytes that a fit, variances and draws need at once, besides those of a batch.

        :param size: p, the number of latents.
        :param like: a tensor with their dtype.
        :param num_rows: the number of rows of the data's Jacobians, where each is stored.
        :returns: 0 if this depends on the data, and is checked where it grows.
        """
        return 0

    @property
    def stores_rows(self) -> bool:
        """True if every row of the data's Jacobians is stored, so that memory grows with them."""
        like = torch.empty(0, device="cpu")
        return self.memory(1, like, 1) > self.memory(1, like)

    @property
    def takes_products(self) -> bool:
        """True if the curvature takes the products of the whole matrix, by ``connect``."""
        return self.curvature.connect is not Curvature.connect

    def __str__(self) -> str:
        return self.name


def named(name: str) -> Any:
    """The field ``name`` of a structure."""
    return field(default=name, init=False, repr=False)


def beside(factor: Any, like: Tensor) -> Any:
    """A number or tensor on the device of a matrix; one of both may be on the CPU, see
    `precision`."""
    elsewhere = isinstance(factor, Tensor) and factor.device != like.device
    return factor.to(like) if elsewhere else factor


Whitened = tuple[Any, Tensor | None]  # a block of a Jacobian, and weights of its entries


def whole_rows(jacobian: Jacobian, values: Tensor) -> Whitened:
    """Rows (K, n, q) in other coordinates, as one block."""
    if values.device != jacobian.like.device:  # from the CPU, where they were float64
        values = values.to(jacobian.like)
    return DenseBlock(BlockPosition(("", 0), slice(0, jacobian.size)), values), None


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


class Precision(Protocol):
    """A positive definite matrix as the precision of a Gaussian with mean zero in R^p.

    ``dense`` is True if the matrix is stored as (p, p), so that another matrix of this size fits in
    memory. ``independent`` is True if the matrix is diagonal.
    """

    dense: ClassVar[bool] = False
    independent: ClassVar[bool] = False
    size: int

    @abstractmethod
    def logdet(self) -> Tensor:
        """Return log det of the precision, a scalar."""
        ...

    @abstractmethod
    def sample(self, num_samples: int) -> Tensor:
        """Return draws (S, p)."""
        ...

    def draw(self, num_samples: int) -> LinearDraws:
        """Return S draws for use in linear functions, without forming their vectors if possible."""
        return VectorDraws(self.sample(num_samples))

    @abstractmethod
    def quadratic(self, x: Tensor) -> Tensor:
        """Return x' precision x for x (..., p)."""
        ...

    @abstractmethod
    def solve(self, x: Tensor) -> Tensor:
        """Return precision^-1 x for x (..., p)."""
        ...

    def precondition(self, x: Tensor) -> Tensor:
        """Return about precision^-1 x for x (..., p), at a low cost and linearly in x."""
        return self.solve(x)

    @abstractmethod
    def variances(self) -> Tensor:
        """Return the marginal variances (p,)."""
        ...

    def weighted_trace(self, weights: Tensor) -> Tensor:
        """Return sum_i w_i C_ii, a scalar, for C = precision^-1 and weights (p,)."""
        return (weights * self.variances()).sum()

    @abstractmethod
    def whitened(self, jacobian: Jacobian) -> Iterable[Whitened]:
        """Yield blocks and weights whose weighted Gram matrices add up to J C J', with C =
        precision^-1, without a difference of larger ones."""
        ...

    def covariance(self, jacobian: Jacobian) -> Tensor:
        """Return J_n C J_n' for every datum, (n, K, K)."""
        n, columns = jacobian.num_data, jacobian.num_columns
        result = jacobian.like.new_zeros(n, columns, columns)
        for block, weights in self.whitened(jacobian):
            result += block.gram(weights)
        return result

    def output_variances(self, jacobian: Jacobian) -> Tensor:
        """Return the diagonals of ``covariance``, (n, K)."""
        result = jacobian.like.new_zeros(jacobian.num_data, jacobian.num_columns)
        for block, weights in self.whitened(jacobian):
            result += block.norms(weights)
        return result

    def joint_covariance(self, jacobian: Jacobian) -> Tensor:
        """Return J C J' over all data, (n K, n K), data before columns."""
        total = jacobian.num_data * jacobian.num_columns
        result = jacobian.like.new_zeros(total, total)
        for block, weights in self.whitened(jacobian):
            result += joint_gram(block, weights)
        return result


class Curvature(nn.Module, ABC):
    """The matrix sum_n J_n' J_n (p, p), in the compressed form of one structure.

    ``passes`` is the number of passes over the data. Each pass calls ``start_pass`` first, ``add``
    with every Jacobian, and ``end_batch`` after each batch. ``scale`` and ``finish`` come last.
    Buffers hold the result, so that it is moved and saved with the guide.

    ``takes_hessian`` is True if it has a ``matrix`` (p, p), for curvature="hessian".
    ``takes_softmax`` is True if ``add`` accepts ``SoftmaxBlock``s, which hold the curvature of a
    classifier's last layer without rows. ``takes_single_rows`` is True if ``add`` needs the factors
    of every datum's own gradients. ``is_sampled`` is True if variances and covariances are Monte
    Carlo estimates. ``needs_earlier`` is True if it is made with the curvature of earlier data.

    ``makes`` says which numbers ``add`` makes of each datum's gradients, so that batches are cut to
    fit in memory: "rows" of all p latents, the "entries" of one block at a time, or nothing but
    "factors". ``per_column`` says what each further column adds; by default as much.
    """

    makes: ClassVar[Literal["rows", "entries", "factors"]] = "rows"
    per_column: ClassVar[str | None] = None

    is_sampled: ClassVar[bool] = False
    needs_earlier: ClassVar[bool] = False
    takes_single_rows: ClassVar[bool] = False
    takes_hessian: ClassVar[bool] = False
    takes_softmax: ClassVar[bool] = False
    passes: int = 1
    size: int

    def plan(self) -> Any:
        """The tree of numbers, strings and tensors that ``build`` needs of a fitted curvature
        besides its state."""
        return None

    def build(self, plan: Any) -> None:
        """Make room, in an empty curvature, for the state of one with this plan."""

    def start_pass(self, number: int) -> None:
        """Prepare for a pass over the data, counted from 0."""

    @abstractmethod
    def add(self, jacobian: Jacobian) -> None:
        """Add the outer products of a Jacobian's rows."""

    def end_batch(self) -> None:
        """Drop values that belong to the current batch only."""

    def connect(self, products: Any) -> None:
        """Take the products of the whole data's matrix with vectors (``GaussNewtonProducts``),
        after ``scale``; None where the data are not at hand."""

    def sums(self) -> list[Tensor]:
        """Return the sums of the pass, by default the buffers; with several processes, the other
        processes' sums are added in place."""
        return list(self.buffers(recurse=False))

    def add_up(self, ranks: Ranks) -> None:
        """Replace the sums of the pass over this process's data by those over all processes'."""
        ranks.add_up(self.sums())

    def scale(self, factor: float) -> None:
        """Multiply the sums by a factor."""
        for total in self.sums():
            total *= factor

    def finish(self, before: Self | None) -> Self:
        """Return the curvature after all passes, including earlier data.

        By default it is ``before`` after ``before.merge(self)``.
        """
        if before is None:
            return self
        before.merge(self)
        return before

    def merge(self, other: Self) -> None:
        """Add the curvature of more data."""
        for mine, theirs in zip(self.sums(), other.sums(), strict=True):
            mine += theirs

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the diagonal (p,)."""

    def spectra(self, groups: Sequence[Mapping[str, slice]]) -> list[Tensor] | None:
        """Return eigenvalues l (m,) of each group of m latents, such that for every prior with one
        precision d in each group

            log det(factor * curvature + prior) = sum over groups, sum_i log(factor l_i + d)

        None, by default, where there are no such numbers or they cost more than they spare.

        :param groups: sites and their slices; together they cover all p numbers.
        """
        return None

    @abstractmethod
    def with_prior(self, prior: PriorPrecision, factor: Tensor | float = 1.0) -> Precision:
        """Return the posterior precision: factor times this curvature, plus the prior's.

        :param factor: a factor of the curvature. Like the prior it may have a graph, for gradients
            of the evidence.
        """


def log_prob(precision: Any, x: Tensor) -> Tensor:
    """Return log N(x; 0, precision^-1) for x (..., p)."""
    constant = precision.size * math.log(2 * math.pi)
    return 0.5 * (precision.logdet() - precision.quadratic(x) - constant)


def resize_buffers(
    module: nn.Module, names: tuple[str, ...], state: Any, prefix: str, like: Tensor
) -> None:
    """Resize a module's buffers to those in a state, since their shapes depend on the data."""
    for name in names:
        value = state.get(prefix + name)
        setattr(module, name, None if value is None else like.new_empty(value.shape))

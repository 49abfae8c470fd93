"""Distributions of observations from which discrete latents were summed out."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from pyro.distributions import MixtureSameFamily
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution, constraints

from pyro_bdl.program.discrete.elimination import ROOM


class MarginalShape(NamedTuple):
    """Batch and event shapes of a marginal, and the dimensions of a table that its batch is.

    ``first`` and ``last`` bound these dimensions, from the right; ``is_plain`` tells that all of
    the batch lie to the left of the event, so that ``value``, the shape of a draw, is both.
    """

    batch: torch.Size
    event: torch.Size
    value: torch.Size
    first: int
    last: int
    is_plain: bool

    @classmethod
    def of(cls, fn: Any, dims: set[int], cells: set[int]) -> "MarginalShape":
        """The shapes of a marginal with a term for each cell of some plates.

        :param dims: the dimensions of all plates around the statement.
        :param cells: those of the plates whose cells have terms.
        """
        sizes = ((1,) * ROOM + tuple(fn.batch_shape))[-ROOM:]
        used = [dim for dim in range(-ROOM, 0) if sizes[dim] > 1 or dim in dims]
        value = torch.Size((*sizes[ROOM + min(used, default=0) :], *fn.event_shape))
        last = min((dim for dim in used if dim not in cells), default=0)
        if all(dim < last for dim in cells):
            first = min([last, *used])
            batch, event = value[: last - first], value[last - first :]
            return cls(batch, event, value, first, last, True)
        first = min(cells)
        batch = torch.Size(sizes[dim] if dim in cells else 1 for dim in range(first, 0))
        return cls(batch, torch.Size(), value, first, 0, False)

    def laid_out(self, table: Tensor) -> Tensor:
        """A table (*any, *ROOM dims) with the batch in place of its last dimensions, (*any,
        *batch)."""
        rest = table.shape[: table.dim() - ROOM]
        sizes = table.shape[len(rest) + ROOM + self.first : len(rest) + ROOM + self.last]
        return table.reshape(rest + sizes).expand(rest + self.batch)


class JointMarginal(TorchDistribution):
    """p(y | w), a sum over discrete sites that is not a mixture for each datum.

    :param density: log p(y | w) of a value, of the batch shape.
    :param draw: a value drawn from it.
    """

    couples_data = True
    arg_constraints: ClassVar[dict[str, Any]] = {}
    support: Any = None

    def __init__(
        self,
        density: Callable[[Tensor], Tensor],
        draw: Callable[[], Tensor],
        support: Any,
        shape: MarginalShape,
    ) -> None:
        self._density, self._draw, self.support = density, draw, support
        super().__init__(shape.batch, shape.event, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        return self._density(value)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        shape = torch.Size(sample_shape)
        draws = torch.stack([self._draw() for _ in range(shape.numel())])
        return draws.reshape(shape + draws.shape[1:])


class Marginal(MixtureSameFamily):
    """p(y | w) = sum_z p(z | w) p(y | z, w), a mixture that is laid out as such only where it is
    asked for.

    :param mixture: lays it out.
    :param support: that of p(y_n | z_n, w).
    :param couples_data: tells that it is one mixture of all data in a plate.
    """

    def __init__(
        self,
        mixture: Callable[[], MixtureSameFamily],
        support: Any,
        shape: MarginalShape,
        couples_data: bool,
    ) -> None:
        self._make, self._support, self.couples_data = mixture, support, couples_data
        self._event_ndims = len(shape.event)
        self._laid_out: MixtureSameFamily | None = None
        Distribution.__init__(self, shape.batch, shape.event, validate_args=False)

    @constraints.dependent_property
    def support(self) -> Any:
        inner = self._event_ndims - self._support.event_dim
        if self._support in (constraints.real, constraints.real_vector):  # so without the mixture
            support = constraints.independent(self._support, inner) if inner else self._support
            return constraints.MixtureSameFamilyConstraint(support)
        return super().support

    def _mixture(self) -> Any:
        if self._laid_out is None:
            self._laid_out = self._make()
        return self._laid_out

    @property
    def _mixture_distribution(self) -> Any:
        return self._mixture().mixture_distribution

    @property
    def _component_distribution(self) -> Any:
        return self._mixture().component_distribution

    @property
    def _num_component(self) -> int:
        return self._mixture()._num_component

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Any:
        return self._mixture().expand(batch_shape)

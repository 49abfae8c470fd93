"""Distributions of observations from which discrete latents were summed out, and their checks."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from pyro.distributions import MixtureSameFamily
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution, constraints


class MarginalShape(NamedTuple):
    """Batch and event shapes of a marginal, and the dims of the table that they are.

    ``first`` and ``last`` bound the dims of the batch; ``is_plain`` tells that all dims between
    them have a term for each entry.
    """

    batch: torch.Size
    event: torch.Size
    first: int
    last: int
    is_plain: bool


class JointMarginal(TorchDistribution):
    """p(y | w), a sum over discrete sites that is not a mixture for each datum.

    :param density: log p(y | w) of a value, of the batch shape.
    :param draw: a value drawn from it.
    """

    couples_data = True
    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        density: Callable[[Tensor], Tensor],
        draw: Callable[[], Tensor],
        support: Any,
        shape: MarginalShape,
    ) -> None:
        self._density, self._draw, self._support = density, draw, support
        super().__init__(shape.batch, shape.event, validate_args=False)

    @constraints.dependent_property
    def support(self) -> Any:
        return self._support

    def log_prob(self, value: Tensor) -> Tensor:
        return self._density(value)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        shape = torch.Size(sample_shape)
        if not shape:
            return self._draw()
        draws = torch.stack([self._draw() for _ in range(shape.numel())])
        return draws.reshape(shape + draws.shape[1:])


class Marginal(MixtureSameFamily):
    """p(y | w) = sum_z p(z | w) p(y | z, w), a mixture whose components are laid out as such only
    where they are asked for.

    ``couples_data`` tells that it is one mixture of all data in a plate.

    :param density: log p(y | w) of a value, of the batch shape.
    :param mixture: the same distribution as a mixture.
    :param support: that of p(y_n | z_n, w).
    """

    def __init__(
        self,
        density: Callable[[Tensor], Tensor],
        mixture: Callable[[], MixtureSameFamily],
        support: Any,
        shape: MarginalShape,
        couples_data: bool,
    ) -> None:
        self._density, self._mixture, self._event_ndims = density, mixture, len(shape.event)
        self._support = support
        self.couples_data = couples_data
        self._laid_out: Any = None
        Distribution.__init__(self, shape.batch, shape.event, validate_args=False)

    @constraints.dependent_property
    def support(self) -> Any:
        inner = self._event_ndims - self._support.event_dim
        if self._support in (constraints.real, constraints.real_vector):  # so without the mixture
            support = constraints.independent(self._support, inner) if inner else self._support
            return constraints.MixtureSameFamilyConstraint(support)
        return super().support

    def _as_mixture(self) -> Any:
        if self._laid_out is None:
            self._laid_out = self._mixture()
        return self._laid_out

    @property
    def _mixture_distribution(self) -> Any:
        return self._as_mixture().mixture_distribution

    @property
    def _component_distribution(self) -> Any:
        return self._as_mixture().component_distribution

    @property
    def _num_component(self) -> int:
        return self._as_mixture()._num_component

    def log_prob(self, value: Tensor) -> Tensor:
        return self._density(value)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Any:
        return self._as_mixture().expand(batch_shape)


def one_step_ahead(run: Any) -> str | None:
    """Return why the terms of a run's log likelihood are not log p(y_n | w) of each datum, as
    leave-one-out takes them; None where they are."""
    name = None if run.discrete is None else run.discrete.one_step_ahead
    if name is None:
        return None
    return (
        f"the data of the site '{name}' depend on other data through discrete sites that are "
        "summed out, so that its terms are joint or one-step-ahead densities: leaving one term out "
        "does not leave one datum out"
    )


def bias_of_minibatches(run: Any) -> str | None:
    """Return why a minibatch's estimate of the log likelihood is biased; None where it is not."""
    if run.discrete is None or run.discrete.biased is None:
        return None
    site, discrete = run.discrete.biased
    return (
        f"the discrete site '{discrete}' stands outside of a subsampled plate of '{site}', so that "
        "minibatches give a biased estimate of the log of its sum, with N/B inside of the log: "
        "pass all data at once"
    )


def coupled_data(run: Any) -> str | None:
    """The first observed site that is not a product of mixtures, one for each datum, since discrete
    sites outside of its plates are summed out; None where there is none."""
    kinds = (Marginal, JointMarginal)
    return next(
        (
            name
            for name, site in run.observed.items()
            if isinstance(site.distribution, kinds) and site.distribution.couples_data
        ),
        None,
    )

"""Guides with one Normal distribution over the flat vector."""

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_bdl.curvature.structures.base import log_prob
from pyro_bdl.distributions.low_rank_normal import PrecisionOfLowRankCovariance
from pyro_bdl.guides.base import Guide
from pyro_bdl.program.gaussian_prior import (
    GaussianPrior,
    StoredPrecision,
    independent_prior,
    joint_prior,
)
from pyro_bdl.program.subset import Subset


class NormalGuide(Guide):
    """Base class of guides with q(u) = Normal(m, P^-1) over ``subset``; the others are fixed at m.

    A family defines ``location()`` and ``precision``, a ``Precision`` of which the functions of
    Jacobians may be left out.
    """

    normal_marginals = True
    subset: Subset

    @property
    def precision(self) -> Any:
        """P."""
        raise NotImplementedError

    @property
    def has_density(self) -> bool:
        return self.subset.complete

    @property
    def numbers_drawn(self) -> int:
        self.require_layout()
        return self.subset.size

    def sample_vectors(self, num_samples: int) -> Tensor:
        loc = self.location()
        return self.subset.put(loc, self._subset_draws(loc, num_samples))

    def sample_latents(self, num_samples: int) -> dict[str, Tensor]:
        num_samples, loc = self._checked_count(num_samples), self.location()
        return self.subset.latents(loc, self._subset_draws(loc, num_samples))

    def _subset_draws(self, loc: Tensor, num_samples: int) -> Tensor:
        """Draws (num_samples, p) of the latents in the subset."""
        return self.subset.take(loc) + self.precision.sample(num_samples).to(loc)

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        """log q(w) of the latents in the subset."""
        offset = self.subset.take(vector - self.location())
        return log_prob(self.precision, offset).to(vector) - log_det

    def entropy(self, vector: Tensor, log_det: Tensor) -> Tensor:
        constant = self.subset.size * (1.0 + math.log(2 * math.pi))
        return 0.5 * (constant - self.precision.logdet()).to(log_det) + log_det

    def variances(self) -> Tensor:
        """The marginal variances of the unconstrained vector (P,), zero outside the subset."""
        loc = self.location()
        return self.subset.put(torch.zeros_like(loc), self.precision.variances().to(loc))

    def stored_precision(self) -> nn.Module:
        """A module of buffers whose call makes P, for a prior."""
        raise NotImplementedError

    def precision_diagonal(self) -> Tensor | None:
        """The diagonal of P; by default computed from its quadratic form."""
        return None

    @torch.no_grad()
    def as_prior(self) -> GaussianPrior:
        """A Gaussian prior over the subset, with the other latents fixed; see ``Guide.as_prior``.

        :raises ValueError: if the subset holds only some of a site's entries.
        """
        self._require_global()
        loc = self.location()
        if self.subset.complete and self.precision.independent:
            return independent_prior(self.subset.layout, loc, self.variances().sqrt())
        stored, diagonal = self.stored_precision(), self.precision_diagonal()
        return joint_prior(self.subset, loc, stored, diagonal)


class LowRankNormal(NormalGuide):
    """Base class of guides with q(u) = Normal(m, diag(s^2) + W W').

    A family defines ``location()`` and ``scale_and_factor()``.
    """

    def scale_and_factor(self) -> tuple[Tensor, Tensor]:
        """s (P,) and W (P, rank)."""
        raise NotImplementedError

    @property
    def precision(self) -> PrecisionOfLowRankCovariance:
        return PrecisionOfLowRankCovariance(*self.scale_and_factor())

    def stored_precision(self) -> StoredPrecision:
        return StoredPrecision(PrecisionOfLowRankCovariance, *self.scale_and_factor())

    def precision_diagonal(self) -> Tensor:
        return self.precision.diagonal()

    def get_posterior(self, *args: Any, **kwargs: Any) -> dist.TorchDistribution:
        """q over the unconstrained vector (P,)."""
        self._prototype_if_given(args, kwargs)
        loc, (scale, factor) = self.location(), self.scale_and_factor()
        if not factor.shape[-1]:
            return dist.Normal(loc, scale).to_event(1)
        return dist.LowRankMultivariateNormal(loc, factor, scale.square())

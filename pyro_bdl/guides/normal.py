"""Guides with one Normal distribution over the flat vector."""

import math
from typing import Protocol

from torch import Tensor

from pyro_bdl.guides.base import Guide


class FactoredCovariance(Protocol):
    """A covariance Sigma (P, P) that is not stored as a matrix."""

    def sample(self, num_samples: int) -> Tensor:
        """Draws (num_samples, P) of N(0, Sigma)."""

    def inverse_quadratic(self, x: Tensor) -> Tensor:
        """x' Sigma^-1 x for x (..., P)."""

    def log_det(self) -> Tensor:
        """log det Sigma, a scalar."""

    def diagonal(self) -> Tensor:
        """The variances (P,)."""


def log_normal(offset: Tensor, covariance: FactoredCovariance) -> Tensor:
    """log N(offset; 0, Sigma) in nats, (...), for offsets (..., P)."""
    constant = offset.shape[-1] * math.log(2 * math.pi)
    return -0.5 * (covariance.inverse_quadratic(offset) + covariance.log_det() + constant)


class NormalGuide(Guide):
    """Base class of guides with q(u) = Normal(m, Sigma).

    A family defines ``location()`` and ``factored_covariance()``, and how it makes its parameters.
    """

    normal_marginals = True

    def factored_covariance(self) -> FactoredCovariance:
        """Sigma."""
        raise NotImplementedError

    def sample_vectors(self, num_samples: int) -> Tensor:
        return self.location() + self.factored_covariance().sample(num_samples)

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        return log_normal(vector - self.location(), self.factored_covariance()) - log_det

    def entropy(self, vector: Tensor, log_det: Tensor) -> Tensor:
        constant = vector.shape[-1] * (1.0 + math.log(2 * math.pi))
        return 0.5 * (constant + self.factored_covariance().log_det()) + log_det

    def variances(self) -> Tensor:
        return self.factored_covariance().diagonal()

"""Programs of counts."""

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_bdl.models.base import ObservationModel, Scales, halves


class PoissonRegression(ObservationModel):
    """y ~ Poisson(exp(f(x))) for counts y.

    :param zero_inflated: whether y is zero besides with probability sigmoid(g(x)). The last
        dimension of the network's output is then split into two halves, f and g, and the
        deterministic site ``gate`` is this probability.
    :param options: ``num_data``, ``output`` and ``missing_targets``, see ``ObservationModel``.

    Source: Lambert (1992), Zero-inflated Poisson regression.
    """

    def __init__(
        self, network: nn.Module | None = None, *, zero_inflated: bool = False, **options: Any
    ) -> None:
        super().__init__(network, **options)
        self.zero_inflated = zero_inflated

    def likelihood(self, output: Tensor) -> Distribution:
        f, gate = halves(self, output) if self.zero_inflated else (output, None)
        counts: Any = self._counts(self.record(f))
        if gate is not None:
            pyro.deterministic(self._site("gate"), gate.sigmoid())
            counts = dist.ZeroInflatedDistribution(counts, gate_logits=gate)
        return counts.to_event(f.dim() - 1)

    def _counts(self, f: Tensor) -> Distribution:
        return dist.Poisson(f.exp())

    def observation_shape(self, output: Tensor) -> torch.Size:
        return halves(self, output)[0].shape if self.zero_inflated else output.shape

    def _checked_targets(self, output: Tensor, y: Tensor) -> Tensor:
        return super()._checked_targets(output, y).to(output.dtype)


class NegativeBinomialRegression(PoissonRegression):
    """Counts y with mean m = exp(f(x)) and variance m + (dispersion m)^2: Poisson counts whose rate
    varies around m by a Gamma distribution. Without dispersion they are those of a Poisson.

    :param dispersion: the sd of the rate, as a share of m: a number, a ``PyroParam`` or a
        distribution (then a latent site of that name; by default a LogNormal with median 0.5), for
        all targets or, as in ``Regression``, for each.
    :param zero_inflated: as of ``PoissonRegression``.
    :param options: ``num_data``, ``output`` and ``missing_targets``, see ``ObservationModel``.

    Source: Cameron & Trivedi (1998), Regression analysis of count data, the model NB2.
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        *,
        dispersion: Scales | None = None,
        zero_inflated: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(network, zero_inflated=zero_inflated, **options)
        self._declare("dispersion", dist.LogNormal(-0.7, 1.0) if dispersion is None else dispersion)

    def _counts(self, f: Tensor) -> Distribution:
        dispersion = self._hyperparameter("dispersion", f)
        count = dispersion.square().reciprocal()
        return dist.NegativeBinomial(count, logits=f + 2 * dispersion.log())

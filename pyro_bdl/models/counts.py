"""Programs of counts."""

from typing import Any, Literal

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_bdl.distributions.targets import ZeroTruncated
from pyro_bdl.models.base import ObservationModel, Scales, halves
from pyro_bdl.utils.validation import one_of


class PoissonRegression(ObservationModel):
    """y ~ Poisson(exp(f(x))) for counts y.

    :param zeros: "inflated", zero besides with probability sigmoid(g(x)); "hurdle", zero with this
        probability, and otherwise a count that is not zero. The last dimension of the network's
        output is then split into two halves, f and g, and the deterministic site ``gate`` is this
        probability. None: as many zeros as a Poisson has.
    :param options: ``num_data``, ``output`` and ``missing_targets``, see ``ObservationModel``.
    :raises ValueError: for other ``zeros``.

    Source: Lambert (1992), Zero-inflated Poisson regression; Mullahy (1986), Specification and
    testing of some modified count data models.
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        *,
        zeros: Literal["inflated", "hurdle"] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(network, **options)
        self.zeros = one_of(zeros, "zeros", ("inflated", "hurdle", None))

    def likelihood(self, output: Tensor) -> Distribution:
        f, gate = (output, None) if self.zeros is None else halves(self, output)
        counts: Any = self._counts(self.record(f))
        if gate is not None:
            pyro.deterministic(self._site("gate"), gate.sigmoid())
            counts = ZeroTruncated(counts) if self.zeros == "hurdle" else counts
            counts = dist.ZeroInflatedDistribution(counts, gate_logits=gate)
        return counts.to_event(f.dim() - 1)

    def _counts(self, f: Tensor) -> Distribution:
        return dist.Poisson(f.exp())

    def observation_shape(self, output: Tensor) -> torch.Size:
        return output.shape if self.zeros is None else halves(self, output)[0].shape

    def _checked_targets(self, output: Tensor, y: Tensor) -> Tensor:
        return super()._checked_targets(output, y).to(output.dtype)


class NegativeBinomialRegression(PoissonRegression):
    """Counts y with mean m = exp(f(x)) and variance m + (dispersion m)^2: Poisson counts whose rate
    varies around m by a Gamma distribution. Without dispersion they are those of a Poisson.

    :param dispersion: the sd of the rate, as a share of m: a number, a ``PyroParam`` or a
        distribution (then a latent site of that name; by default a LogNormal with median 0.5), for
        all targets or, as in ``Regression``, for each.
    :param zeros: as of ``PoissonRegression``.
    :param options: ``num_data``, ``output`` and ``missing_targets``, see ``ObservationModel``.

    Source: Cameron & Trivedi (1998), Regression analysis of count data, the model NB2.
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        *,
        dispersion: Scales | None = None,
        zeros: Literal["inflated", "hurdle"] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(network, zeros=zeros, **options)
        self._declare("dispersion", dist.LogNormal(-0.7, 1.0) if dispersion is None else dispersion)

    def _counts(self, f: Tensor) -> Distribution:
        dispersion = self._hyperparameter("dispersion", f)
        count = dispersion.square().reciprocal()
        return dist.NegativeBinomial(count, logits=f + 2 * dispersion.log())

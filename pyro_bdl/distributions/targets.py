"""Laws of single targets: counts that are never zero, for hurdles (zero or not first, then how
many), and ordered classes by cumulative logits."""

from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution, constraints
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from pyro_bdl.utils.validation import require


class ZeroTruncated(TorchDistribution):
    """Counts of a Poisson or a negative binomial given that they are not zero, p(y) / (1 - p(0)).

    Zero has the density 0 and is in the support, so that ``ZeroInflatedDistribution`` of it is a
    hurdle: zero with the probability of the gate, and nothing else makes zeros.

    :param base_dist: the counts with zeros.

    Source: Mullahy (1986), Specification and testing of some modified count data models.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012
    support = constraints.nonnegative_integer

    def __init__(self, base_dist: Any, validate_args: bool | None = None) -> None:
        kinds = torch.distributions.Poisson | dist.NegativeBinomial
        require(base_dist, kinds, "ZeroTruncated takes a Poisson or a NegativeBinomial")
        self.base_dist = base_dist
        super().__init__(base_dist.batch_shape, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "ZeroTruncated":
        return type(self)(self.base_dist.expand(batch_shape), self._validate_args)

    def _share(self, like: Tensor) -> Tensor:
        """1 - p(0)."""
        return -torch.expm1(self.base_dist.log_prob(torch.zeros_like(like)))

    def log_prob(self, value: Tensor) -> Tensor:
        # a number at zero too, so that its gradient is one
        log_p = self.base_dist.log_prob(value.clamp(min=1.0)) - self._share(value).log()
        return torch.where(value == 0, -torch.inf, log_p)

    @property
    def mean(self) -> Tensor:
        return self.base_dist.mean / self._share(self.base_dist.mean)

    @property
    def variance(self) -> Tensor:
        second = self.base_dist.variance + self.base_dist.mean.square()
        mean = self.mean
        return (second / self._share(mean) - mean.square()).clamp(min=0.0)

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """A first event, at a time before the end given that there is one, and those after it.

        A Poisson has them at rate 1 until its mean. A negative binomial is a sum of jumps until
        its ``total_count``, at rate -log(1 - p), each of a logarithmic series (Kemp 1981).
        """
        base: Any = self.base_dist.expand(self._extended_shape(torch.Size(sample_shape)))
        is_poisson = isinstance(base, torch.distributions.Poisson)
        end = base.rate if is_poisson else base.total_count
        rate = torch.ones_like(end) if is_poisson else softplus(base.logits)
        time = -torch.log1p(torch.rand_like(end) * torch.expm1(-rate * end)) / rate
        rest = (end - time).clamp(min=torch.finfo(end.dtype).tiny)
        if is_poisson:
            return 1.0 + torch.poisson(rest)
        q = -torch.expm1(-rate * torch.rand_like(rate))
        jump = 1.0 + torch.floor(torch.rand_like(q).log() / q.log())
        return jump + dist.NegativeBinomial(rest, logits=base.logits, validate_args=False).sample()


class OrderedLogistic(dist.OrderedLogistic):
    """Pyro's ``OrderedLogistic`` with logits: P(y <= k) = sigmoid(c_k - f), c_0 < c_1 < ...

    Pyro's own has the differences of two probabilities, which cancel far from the cut points, and
    writes them in place, which ``vmap`` cannot follow. Here log P(y = k) is
    log sigmoid(c_k - f) + log sigmoid(f - c_(k-1)) + log(1 - exp(c_(k-1) - c_k)).

    :param predictor: f, ``(*batch)``.
    :param cutpoints: c, ``(*batch, K - 1)`` or fewer batch dimensions, increasing.

    Source: McCullagh (1980), Regression models for ordinal data.
    """

    def __init__(
        self, predictor: Tensor, cutpoints: Tensor, validate_args: bool | None = None
    ) -> None:
        gap = cutpoints - predictor[..., None]
        below, above = logsigmoid(gap), logsigmoid(-gap)
        between = torch.log(-torch.expm1(cutpoints[..., :-1] - cutpoints[..., 1:]))
        inner = below[..., 1:] + above[..., :-1] + between
        self.predictor, self.cutpoints = predictor.expand(gap.shape[:-1]), cutpoints.expand_as(gap)
        logits = torch.cat([below[..., :1], inner, above[..., -1:]], -1)
        dist.Categorical.__init__(self, logits=logits, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "OrderedLogistic":
        batch_shape = torch.Size(batch_shape)
        cutpoints = self.cutpoints.expand(*batch_shape, self.cutpoints.shape[-1])
        return type(self)(self.predictor.expand(batch_shape), cutpoints, self._validate_args)

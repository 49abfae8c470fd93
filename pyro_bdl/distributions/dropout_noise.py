"""Dropout noise: distributions of a random factor eps with E[eps] = 1 and variance p / (1 - p).

Each is parameterized by the rate p of the Bernoulli noise with the same variance. Gaussian noise of
variance alpha therefore has p = alpha / (1 + alpha) (Srivastava et al. 2014, section 10).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pyro.distributions import TorchDistribution, constraints
from torch import Tensor
from torch.distributions import Independent, Normal, register_kl

from pyro_bdl.utils.validation import real_number, whole_number

Temperature = float | Callable[[int], float]


@dataclass(frozen=True)
class Annealed:
    """An exponential schedule: start * (stop / start)^(step / steps) up to ``steps``, then
    ``stop``."""

    start: float = 1.0
    stop: float = 0.1
    steps: int = 1000

    def __post_init__(self) -> None:
        real_number(self.start, "start")
        real_number(self.stop, "stop")
        whole_number(self.steps, "steps")

    def __call__(self, step: int) -> float:
        return self.start * (self.stop / self.start) ** min(step / self.steps, 1.0)


def variance(p: Tensor) -> Tensor:
    """Return Var[eps] = p / (1 - p)."""
    return p / (1.0 - p)


class Noise:
    """Base class of dropout noise. ``p`` is a tensor (K,) of rates, one for each factor."""

    def sample(self, p: Tensor, num_samples: int) -> Tensor:
        """Draw independent factors (num_samples, K)."""
        raise NotImplementedError

    def schedule(self, step: int) -> float:
        """The number that ``rsample`` needs after so many training steps; by default the steps."""
        return step

    def rsample(self, p: Tensor, num_samples: int, scheduled: float | Tensor) -> Tensor:
        """Draw factors (num_samples, K) that are differentiable in p.

        :param scheduled: the number of ``schedule``; in a compiled step a scalar tensor.
        """
        raise NotImplementedError

    def entropy(self, p: Tensor) -> Tensor:
        """Return the entropy of each factor in nats, (K,), up to a constant that does not depend on
        p."""
        raise NotImplementedError

    def quantile(self, levels: Tensor, p: Tensor) -> Tensor:
        """Return the quantiles of eps at ``levels``, broadcast with p."""
        raise NotImplementedError


class BernoulliNoise(Noise):
    """eps = 0 with probability p, else 1 / (1 - p): the factors of ``torch.nn.Dropout``.

    A learned rate is trained through the concrete relaxation z / (1 - p) of eps, with
    z = sigmoid((log (1 - p) / p + log u / (1 - u)) / T) for a uniform u (Gal, Hron & Kendall 2017,
    section 3.2; Maddison et al. 2017). Draws without gradients are exact.

    :param temperature: T, a number or a schedule ``step -> T``.
    :raises TypeError: for a temperature that is neither.
    :raises ValueError: for a temperature that is not positive.
    """

    def __init__(self, temperature: Temperature | None = None) -> None:
        if temperature is not None and not callable(temperature):
            real_number(temperature, "temperature")
        self.temperature = Annealed() if temperature is None else temperature

    def sample(self, p: Tensor, num_samples: int) -> Tensor:
        uniform = torch.rand(num_samples, len(p), dtype=p.dtype, device=p.device)
        return (uniform >= p) / (1.0 - p)

    def schedule(self, step: int) -> float:
        """The temperature."""
        return self.temperature(step) if callable(self.temperature) else self.temperature

    def rsample(self, p: Tensor, num_samples: int, scheduled: float | Tensor) -> Tensor:
        uniform = torch.rand(num_samples, len(p), dtype=p.dtype, device=p.device)
        tiny = torch.finfo(p.dtype).eps
        odds = torch.logit(1.0 - p, eps=tiny) + torch.logit(uniform, eps=tiny)
        return torch.sigmoid(odds / scheduled) / (1.0 - p)

    def entropy(self, p: Tensor) -> Tensor:
        return -(torch.xlogy(p, p) + torch.xlogy(1.0 - p, 1.0 - p))

    def quantile(self, levels: Tensor, p: Tensor) -> Tensor:
        return (levels > p) / (1.0 - p)


class GaussianNoise(Noise):
    """eps ~ Normal(1, alpha) with alpha = p / (1 - p) (Kingma, Salimans & Welling 2015).

    If the rates are learned, the bound contains the entropies of eps, under the program's own
    prior.

    Variational dropout uses the prior ``priors.LogUniform``. The bound then also contains the
    density of w, and the KL depends on alpha alone: ``log_uniform_kl`` for each weight. That prior
    is improper: the weights have no posterior under it, and the objective is not a lower bound on a
    marginal likelihood (Hron, Matthews & Ghahramani 2018, section 3).
    """

    def sample(self, p: Tensor, num_samples: int) -> Tensor:
        normal = torch.randn(num_samples, len(p), dtype=p.dtype, device=p.device)
        return 1.0 + variance(p).sqrt() * normal

    def rsample(self, p: Tensor, num_samples: int, scheduled: float | Tensor) -> Tensor:
        return self.sample(p, num_samples)

    def entropy(self, p: Tensor) -> Tensor:
        return 0.5 * (math.log(2 * math.pi * math.e) + variance(p).log())

    def quantile(self, levels: Tensor, p: Tensor) -> Tensor:
        return 1.0 + variance(p).sqrt() * torch.special.ndtri(levels)


def log_uniform_kl(alpha: Tensor) -> Tensor:
    """KL of w ~ Normal(m, alpha m^2) from the log-uniform prior, in nats for each weight.

    An approximation, with the constant chosen so that it falls to 0 as alpha grows (Molchanov,
    Ashukha & Vetrov 2017, eq. 14).
    """
    k1, k2, k3 = _K
    return k1 - k1 * torch.sigmoid(k2 + k3 * alpha.log()) + 0.5 * torch.log1p(1.0 / alpha)


_K = (0.63576, 1.87320, 1.48695)
# E[log q - log p] for the density 1 / |w| is this KL minus its value for a narrow q, which is exact
_OFFSET = _K[0] + 0.5 * math.log(2 * math.pi * math.e)


def scale_free_kl(p: Tensor, count: int) -> Tensor:
    """Return E_q[log q(w) - log 1 / |w|], a scalar in nats, for ``count`` weights with the rate
    p."""
    return count * (log_uniform_kl(variance(p)) - _OFFSET)


class NoisyWeight(TorchDistribution):
    """w = m * eps[index], with mean m and one factor eps for all entries with the same index.

    There is no density for m. ``log_prob`` is minus the entropy of the factors if their rate is
    learned, and zero if it is fixed. With a log-uniform prior ``log_prob`` is the expected log
    density of independent weights.

    :param loc: m, of any shape.
    :param index: the number of each entry's factor, with the shape of m.
    :param p: the rate, a scalar.
    :param count: the number of factors.
    :param noise: the distribution of the factors.
    :param scheduled: None for a fixed rate, else a function that returns ``noise.schedule``'s
        number when factors are drawn.
    :param scale_free: whether the prior is log-uniform.
    :param batch_dims: how many leading dimensions of m are batch dimensions, each of whose cells
        has as many factors of its own as any other.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_rsample = True

    def __init__(
        self,
        loc: Tensor,
        index: Tensor,
        p: Tensor,
        count: int,
        noise: Noise,
        scheduled: Callable[[], float | Tensor] | None,
        *,
        scale_free: bool = False,
        batch_dims: int = 0,
    ) -> None:
        self.loc, self.index, self.p, self.count = loc, index, p, count
        self.noise, self.scheduled, self.scale_free = noise, scheduled, scale_free
        shape = loc.shape
        super().__init__(shape[:batch_dims], shape[batch_dims:], validate_args=False)

    @property
    def support(self) -> Any:
        return constraints.independent(constraints.real, len(self.event_shape))

    def quantile(self, levels: Tensor) -> Tensor:
        """Marginal quantiles (levels, *shape)."""
        levels = levels.reshape(-1, *[1] * self.loc.dim())
        levels = torch.where(self.loc >= 0, levels, 1.0 - levels)
        return self.loc * self.noise.quantile(levels, self.p)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        shape = torch.Size(sample_shape)
        factors = draw(self.noise, self.p.expand(self.count), shape.numel(), self.scheduled)
        return (self.loc * factors[:, self.index]).reshape(shape + self.loc.shape)

    def log_prob(self, value: Tensor) -> Tensor:
        batch = value.shape[: value.dim() - len(self.event_shape)]
        return -self.entropy().expand(batch)

    def entropy(self) -> Tensor:
        if self.scale_free:
            logs = self.loc.abs().log().flatten(len(self.batch_shape)).sum(-1)
            return self.event_shape.numel() * self.noise.entropy(self.p) + logs
        if self.scheduled is None:
            return torch.zeros_like(self.p).expand(self.batch_shape)
        count = self.count // self.batch_shape.numel()
        return (count * self.noise.entropy(self.p)).expand(self.batch_shape)

    def as_normal(self) -> Normal | None:
        """Return Normal(m, alpha m^2) if every weight has its own Gaussian factor; else None."""
        if not isinstance(self.noise, GaussianNoise) or self.count < self.loc.numel():
            return None
        deviation = variance(self.p).sqrt() * self.loc.abs()
        return Normal(self.loc, deviation, validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return variance(self.p) * self.loc.square()


def draw(
    noise: Noise, p: Tensor, num_samples: int, scheduled: Callable[[], float | Tensor] | None
) -> Tensor:
    """Draw factors (num_samples, K), relaxed if the rate is learned and a gradient is needed."""
    if scheduled is None or not torch.is_grad_enabled():
        return noise.sample(p, num_samples)
    return noise.rsample(p, num_samples, scheduled())


@register_kl(NoisyWeight, Independent)
def _kl_noisy_normal(q: NoisyWeight, p: Independent) -> Tensor:
    """-H(eps) - E_q[log p(w)] for an independent Normal or log-uniform prior p."""
    base = p.base_dist
    if isinstance(base, ImproperLogUniform) and q.scale_free:
        return scale_free_kl(q.p, q.event_shape.numel()).expand(q.batch_shape)
    if not isinstance(base, Normal) or p.batch_shape != q.batch_shape:
        raise NotImplementedError
    distance = (q.variance + (q.loc - base.loc).square()) / (2.0 * base.scale.square())
    terms = distance + base.scale.log() + 0.5 * math.log(2 * math.pi)
    return terms.flatten(len(q.batch_shape)).sum(-1) - q.entropy()


class ImproperLogUniform(TorchDistribution):
    """The improper density 1 / |w|, uniform in log |w|; it cannot be sampled.

    :param like: a tensor with the distribution's batch shape, dtype and device.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.real

    def __init__(self, like: Tensor) -> None:
        self.like = like
        super().__init__(like.shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "ImproperLogUniform":
        return ImproperLogUniform(self.like.expand(batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        return -value.abs().log()

    def sample(self, sample_shape: Any = ()) -> Tensor:
        raise NotImplementedError(
            "a log-uniform prior is improper and cannot be sampled: give the latent a value"
        )

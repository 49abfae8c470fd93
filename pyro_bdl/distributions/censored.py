"""Targets of which some are only known to lie beyond a limit, or between two."""

import math
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution, constraints
from torch import Tensor

from pyro_bdl.utils.precision import double

LAWS = ("normal", "lognormal", "weibull")
RIGHT, EXACT, LEFT, INTERVAL = range(4)


def uncensored(law: str, loc: Tensor, scale: Tensor) -> Any:
    """The distribution of y: y itself, or of the other laws log y, is loc + scale e, with e of a
    Normal or, for the Weibull, a law of smallest extreme values."""
    if law == "weibull":
        return dist.Weibull(loc.exp(), scale.reciprocal())
    return (dist.Normal if law == "normal" else dist.LogNormal)(loc, scale)


class Censored(TorchDistribution):
    """The distribution of ``uncensored``, of which each value is known as its status says.

    :param law: "normal", "lognormal" or "weibull".
    :param status: 1, the value is y; 0 (right-censored), y is larger; 2 (left-censored), y is
        smaller; 3, y is between the value and ``upper``.

    A sample, the mean and the variance are those of y itself.

    Source: Klein & Moeschberger (2003), Survival analysis, section 3.5; the codes of R's ``Surv``.
    """

    arg_constraints: dict[str, Any] = {  # noqa: RUF012
        "loc": constraints.real,
        "scale": constraints.positive,
        "status": constraints.integer_interval(RIGHT, INTERVAL),
        "upper": constraints.real,
    }

    def __init__(
        self,
        law: str,
        loc: Tensor,
        scale: Tensor,
        status: Tensor,
        upper: Tensor,
        validate_args: bool | None = None,
    ) -> None:
        self.law = law
        self.loc, self.scale, self.status, self.upper = torch.broadcast_tensors(
            loc, scale, status, upper
        )
        super().__init__(self.loc.shape, validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False, event_dim=0)
    def support(self) -> Any:
        return constraints.real if self.law == "normal" else constraints.positive

    @property
    def is_validated(self) -> bool:
        """True if its arguments are checked, as in a program's first run and not under ``vmap``."""
        return bool(self._validate_args)

    @property
    def _whole(self) -> Any:
        return uncensored(self.law, self.loc, self.scale)

    @property
    def mean(self) -> Tensor:
        return self._whole.mean

    @property
    def variance(self) -> Tensor:
        return self._whole.variance

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return self._whole.sample(sample_shape)

    def bounds(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The ends between which y is known to lie; both are the value where it was seen."""
        is_left, is_right = self.status == LEFT, self.status == RIGHT
        upper = torch.where(self.status == INTERVAL, self.upper, value)
        return value.masked_fill(is_left, -math.inf), upper.masked_fill(is_right, math.inf)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "Censored":
        tensors = (self.loc, self.scale, self.status, self.upper)
        loc, scale, status, upper = (v.expand(batch_shape) for v in tensors)
        return type(self)(self.law, loc, scale, status, upper, self._validate_args)

    def log_prob(self, value: Tensor) -> Tensor:
        return self._log_prob(value, self.loc / self.scale, self.scale.reciprocal())

    def _log_prob(self, value: Tensor, place: Tensor, rate: Tensor) -> Tensor:
        """log p of place = loc / scale and rate = 1 / scale, in both of which it is concave."""
        is_interval = self.status == INTERVAL
        upper = torch.where(is_interval, self.upper, 1.0)
        t, upper = (v if self.law == "normal" else v.log() for v in (value, upper))
        z = rate * t - place
        # gradients of all cases are taken, so that each has a number at every value
        end = torch.where(is_interval, rate * upper - place, z + 1.0)
        exact = _log_density(self.law, z) + rate.log() - (0.0 if self.law == "normal" else t)
        (right, left), (further, before_end) = (_log_tails(self.law, at) for at in (z, end))
        # from the tail in which both ends lie: their difference cancels in the other one
        more = torch.where(z > 0, right, before_end)
        less = torch.where(z > 0, further, left)
        within = more + torch.log(-torch.expm1(less - more))
        log_p = torch.where(is_interval, within, exact)
        log_p = torch.where(self.status == RIGHT, right, log_p)
        return torch.where(self.status == LEFT, left, log_p)

    def curvature_roots(
        self, value: Tensor, parameters: dict[str, Tensor]
    ) -> list[dict[str, Tensor]]:
        """Columns of S with S S' = -d^2 log p(value), positive semi-definite, in loc and scale.

        The second derivatives are those in loc / scale and 1 / scale, in which log p is concave
        (Burridge 1981, Empirical Bayes analysis of survival time data), carried over to the two.
        """
        names = [name for name in ("loc", "scale") if name in parameters]
        loc, scale = double(self.loc.detach()), double(self.scale.detach())
        with torch.enable_grad():
            natural = (loc / scale).requires_grad_(), scale.reciprocal().requires_grad_()
            total = self._log_prob(double(value.detach()), *natural).sum()
            gradient = torch.autograd.grad(total, natural, create_graph=True)
            rows = [torch.autograd.grad(g.sum(), natural, retain_graph=True) for g in gradient]
        hessian = -torch.stack([torch.stack(row, -1) for row in rows], -2)
        of_loc = torch.stack([scale.reciprocal(), torch.zeros_like(loc)], -1)
        of_scale = torch.stack([-loc, -torch.ones_like(loc)], -1) / scale.square()[..., None]
        by = torch.stack([of_loc if name == "loc" else of_scale for name in names], -1)
        values, vectors = torch.linalg.eigh(by.mT @ hessian @ by)
        columns = vectors * values.clamp(min=0.0).sqrt()[..., None, :]
        return [
            dict(zip(names, column.to(self.loc).unbind(-1), strict=True))
            for column in columns.unbind(-1)
        ]


def _log_density(law: str, z: Tensor) -> Tensor:
    return z - z.exp() if law == "weibull" else -0.5 * (z.square() + math.log(2 * math.pi))


def _log_tails(law: str, z: Tensor) -> tuple[Tensor, Tensor]:
    """log P(e > z) and log P(e < z)."""
    if law != "weibull":
        return _log_normal_cdf(-z), _log_normal_cdf(z)
    left = torch.log(-torch.expm1(-z.clamp(min=-15.0).exp()))
    return -z.exp(), torch.where(z < -15.0, z - 0.5 * z.exp(), left)


def _log_normal_cdf(z: Tensor) -> Tensor:
    """torch's ``log_ndtr``, which has no batching rule for ``vmap``."""
    below, above = z.clamp(max=-1.0), z.clamp(min=-1.0)
    tail = (torch.special.erfcx(-below / math.sqrt(2)) / 2).log() - below.square() / 2
    return torch.where(z < -1.0, tail, (-torch.erfc(above / math.sqrt(2)) / 2).log1p())

"""The linearized model: its optimum and its likelihood.

Around u* the observation's unconstrained parameters are eta(u*) + J (u - u*). For Normal
observations the evidence of this model is exact at its optimum under the prior. This optimum is
also a better point to evaluate the evidence than a u* from unfinished training (Antoran et al.
2022, section 3).
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.factor_statements import FactorStatements
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.linear_outputs import observed_outputs
from pyro_bdl.curvature.linearized_data import (
    LinearizedBatch,
    LinearizedData,
    first_order_factors,
    log_likelihood_of,
)
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides.laplace import LaplaceGuide
from pyro_bdl.program.trace import leave_open, record
from pyro_bdl.utils.module_state import evaluation_mode

_STEPS = 20
_PRODUCTS = 200
_TOLERANCE = 1e-6
_HALVINGS = 30

_RESIDUAL = 1e-2  # of conjugate gradients, where that of the start is 1
_NEGLIGIBLE = 1e-4  # the gain of one of their steps, in units of the tolerance


def linearized_log_likelihood(guide: LaplaceGuide, offset: Tensor) -> Tensor:
    """The tempered log likelihood of the linearized model at u* + offset in nats, a scalar.

    It is differentiable in the offset (p,) and in the program's parameters. Factor statements
    count to first order: their value and slope at u*.
    """
    total = guide.loc.new_zeros((), dtype=torch.float64)
    for batches, count in guide.passes:
        statements = FactorStatements()
        for args, kwargs in batches:
            at = Linearization(guide.program_model, guide.subset, guide.loc, args, kwargs)
            for outputs in observed_outputs(at, differentiable=True).values():
                total = total + count * log_likelihood_of(outputs, outputs.moved(offset))
            value, slope = first_order_factors(at, statements)
            total = total + count * (value + slope.double() @ offset.double())
    return total


@dataclass
class LinearizedPoint:
    """A point u* + offset of the linearized model.

    :param offset: u - u* in the subset, (p,).
    :param log_likelihood: there, at the noise of the guide's fit, a scalar.
    :param squares: of Normal observations, squared residuals in units of that noise.
    :param gap: about how far its log joint density is from the maximum, in nats.
    :param reached: whether that is within the tolerance.
    :param steps: Newton steps taken.
    """

    offset: Tensor
    log_likelihood: Tensor
    squares: Tensor
    gap: float = math.inf
    reached: bool = False
    steps: int = 0

    def warn(self, stacklevel: int) -> None:
        """Warn where the maximum was not reached."""
        if not self.reached:
            warnings.warn(
                f"the optimum of the linearized model was not reached in {self.steps} Newton "
                f"steps: its log joint density is about {self.gap:.3g} nats higher; take more "
                "steps, or a structure of the curvature that is closer to the full matrix",
                BdlWarning,
                stacklevel=stacklevel + 1,
            )


class LinearizedModel:
    """log p(y, u* + d) of a guide's program with its outputs linear in d, as a function of d (p,).

    The prior is as it is. Where the noise of a Normal observation changes, the model follows the
    guide. The graphs of the data are kept where they fit in an eighth of the free memory; else
    every product runs the program again.

    :raises NotImplementedError: for observations that are not made of tensors.
    """

    def __init__(self, guide: LaplaceGuide) -> None:
        self.guide = guide
        self.loc, self._built = guide.loc, guide.noise_factor
        self._data = LinearizedData(guide.program_model, guide.subset, guide.loc, guide.passes)
        self._start: Tensor | None = None

    @property
    def stale(self) -> bool:
        """True where the guide has moved to another point, or where data that are read again at
        every sum have another noise than at the first."""
        moved = self.guide.loc is not self.loc
        return moved or not (
            self._data.keeps_all or torch.equal(self.guide.noise_factor, self._built)
        )

    @property
    def _factor(self) -> Tensor | float:
        """The present precision of the noise in units of that at which the outputs were read."""
        if self.guide.reference_noise is None:
            return 1.0
        return (self.guide.noise_factor / self._built).double()

    def point(self, offset: Tensor) -> LinearizedPoint:
        """The point at an offset."""
        guide = self.guide
        here = self._data.sum(lambda part: part.log_likelihood(offset))
        if guide.reference_noise is None:
            return LinearizedPoint(offset.to(guide.loc), here, guide.squares)
        if self._start is None:
            zero = torch.zeros_like(offset)
            self._start = self._data.sum(lambda part: part.log_likelihood(zero))
        # log lik = -1/2 c Q + 1/2 n log c + constant, at both points with the same c
        fallen = 2.0 * (self._start - here) / self._built
        value = guide.log_likelihood - 0.5 * fallen
        return LinearizedPoint(offset.to(guide.loc), value, guide.squares + fallen)

    def _value_and_gradient(self, offset: Tensor) -> tuple[float, Tensor]:
        """The log joint density, up to what does not depend on the offset, and its gradient."""
        prior, of_prior = _log_prior(self.guide, offset)

        def both(part: LinearizedBatch) -> Tensor:
            return torch.cat([part.log_likelihood(offset)[None], part.gradient(offset)])

        found = self._data.sum(both) * self._factor
        return float(found[0] + prior), found[1:] + of_prior

    def _times(self, offset: Tensor, vector: Tensor) -> Tensor:
        """J' F J vector, at the noise at which the outputs were read."""
        rounded = vector.to(self.guide.loc)
        return self._data.sum(lambda part: part.times(offset, rounded)).double()

    @torch.no_grad()
    def optimum(
        self,
        start: Tensor | None = None,
        *,
        steps: int = _STEPS,
        tolerance: float = _TOLERANCE,
        products: int = _PRODUCTS,
    ) -> LinearizedPoint:
        """The maximum, by Newton steps of conjugate gradients; see ``linearized_optimum``.

        :param start: an offset near it.
        """
        guide = self.guide
        offset = torch.zeros_like(guide.subset.take(guide.loc), dtype=torch.float64)
        if start is not None:
            offset = start.to(offset)
        value, gradient = self._value_and_gradient(offset)
        rounding = 10 * torch.finfo(guide.loc.dtype).eps * max(1.0, abs(value))
        taken, gap, reached = 0, math.inf, False
        while True:
            limit = max(tolerance * max(1.0, abs(value)), rounding)
            step, gap = self._newton_step(offset, gradient, _NEGLIGIBLE * limit, products)
            reached = gap <= limit
            if taken == steps:
                break
            for _ in range(1 if reached else _HALVINGS):
                moved, slope = self._value_and_gradient(offset + step)
                if moved > value:
                    offset, value, gradient, taken = offset + step, moved, slope, taken + 1
                    break
                step = 0.5 * step
            else:
                break
            if reached:
                break
        point = self.point(offset)
        point.gap, point.reached, point.steps = gap, reached, taken
        return point

    def _newton_step(
        self, offset: Tensor, gradient: Tensor, negligible: float, products: int
    ) -> tuple[Tensor, float]:
        """H^-1 gradient by conjugate gradients with H = J' F J + prior precision, the guide's
        precision as preconditioner; and half the product of both, what the step gains."""
        guide, factor = self.guide, self._factor
        prior, precision = guide.prior, guide.precision

        def solved(x: Tensor) -> Tensor:
            return precision.precondition(x.to(guide.prior_diagonal)).double()

        step, residual = torch.zeros_like(gradient), gradient
        direction = conditioned = solved(residual)
        first = length = float(residual @ conditioned)
        gap = 0.0
        for _ in range(products):
            curved = factor * self._times(offset, direction) + prior.times(direction)
            bend = float(direction @ curved)
            if not bend > 0:  # the prior of a hierarchy may be indefinite
                step = direction if not gap else step
                break
            size = length / bend
            step, residual = step + size * direction, residual - size * curved
            gain = 0.5 * size * length
            gap += gain
            conditioned = solved(residual)
            before, length = length, float(residual @ conditioned)
            if length <= _RESIDUAL**2 * first or gain < negligible:
                break
            direction = conditioned + length / before * direction
        return step, gap or 0.5 * first


def linearized_optimum(
    guide: LaplaceGuide,
    *,
    steps: int = _STEPS,
    tolerance: float = _TOLERANCE,
    products: int = _PRODUCTS,
) -> Tensor:
    """u - u* at the maximum of the linearized model's log joint density, (p,).

    Newton steps s, halved until they gain, with

        (J' F J + prior precision) s = gradient

    solved by conjugate gradients on products with J, the outputs' Fisher information F at the
    present point, and J'. The guide's precision is the preconditioner alone: every structure leads
    to the same point, and the closer it is to the full matrix, the fewer products it takes. With
    the full matrix and Normal observations one step of one product is exact.

    Where the maximum is not reached, a warning says by how much it is missed.

    :param steps: at most so many Newton steps.
    :param tolerance: the search ends where a step would gain less than this fraction of the log
        likelihood (or of one nat, where that is more), or than its rounding error.
    :param products: at most so many products with the Gauss-Newton matrix in a step.
    :raises NotImplementedError: for observations that are not made of tensors.
    """
    guide.refresh()
    point = LinearizedModel(guide).optimum(steps=steps, tolerance=tolerance, products=products)
    point.warn(stacklevel=2)
    return point.offset


def _log_prior(guide: LaplaceGuide, offset: Tensor) -> tuple[Tensor, Tensor]:
    """log p(T(u)) + log |det dT/du| at u* + offset, up to a constant, and its gradient (p,)."""
    prior = guide.prior
    if prior.quadratic:
        bent = prior.times(offset)
        slope = guide.prior_slope.to(offset)
        return (slope - 0.5 * bent) @ offset, slope - bent
    model, subset, layout = guide.program_model, guide.subset, guide.require_layout()
    with torch.enable_grad():
        moved = offset.to(guide.loc, copy=True).requires_grad_()
        vector = subset.put(guide.loc, subset.take(guide.loc) + moved)
        latents, log_det = layout.constrain(vector)
        with evaluation_mode(model):
            run = record(model, latents, *guide.few, draw=leave_open)
        value: Any = run.log_prior() + log_det
        (gradient,) = torch.autograd.grad(value, moved)
    return value.detach().double(), gradient.double()


def either_spelling(linearized: bool | None, linearised: bool | None) -> bool | None:
    """The value of the keyword ``linearized``, also under its former spelling ``linearised``."""
    if linearised is None:
        return linearized
    warnings.warn("the keyword is now linearized=", DeprecationWarning, stacklevel=3)
    return linearised

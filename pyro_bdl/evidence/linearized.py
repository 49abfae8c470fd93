"""The linearized model of a Laplace approximation, and its optimum.

Around u* the observation's unconstrained parameters are eta(u*) + J (u - u*). For Normal
observations the evidence of this model is exact at its optimum under the prior. This optimum is
also a better point to evaluate the evidence than a u* from unfinished training (Antoran et al.
2022, section 3).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bdl.curvature.linearized_data import SHARE_OF_MEMORY, LinearizedData
from pyro_bdl.curvature.prior import log_prior, run_at, slope_of_prior
from pyro_bdl.curvature.structures.full import FullPrecision
from pyro_bdl.errors import warn
from pyro_bdl.guides.gaussian import LaplaceGuide
from pyro_bdl.utils.memory import available_memory
from pyro_bdl.utils.precision import double

_STEPS = 20
_PRODUCTS = 200
_TOLERANCE = 1e-6
_HALVINGS = 30
_DENSE_UP_TO = 2048  # latents, whose matrix preconditions
_COLUMNS = 256  # of the matrix at once
_FEW = 10  # products in a step, after which it is computed anew
_RESIDUAL = 1e-2  # of conjugate gradients, where that of the start is 1
_NEGLIGIBLE = 1e-4  # the gain of one of their steps, in units of the tolerance


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

    def warn(self) -> None:
        """Warn where the maximum was not reached."""
        if not self.reached:
            warn(
                f"the optimum of the linearized model was not reached in {self.steps} Newton "
                f"steps: its log joint density is about {self.gap:.3g} nats higher; take a "
                "structure of the curvature that is closer to the full matrix, or train longer",
                "not-at-a-maximum",
            )


class LinearizedModel:
    """log p(y, u* + d) of a guide's program with its outputs linear in d, as a function of d (p,).

    The prior is as it is, and noise and prior follow the guide. The data's Jacobian is kept where
    it fits in an eighth of the free memory; else their graphs, where these fit; else every product
    runs the program again.

    :raises NotImplementedError: for observations that are not made of tensors.
    """

    def __init__(self, guide: LaplaceGuide) -> None:
        self.guide, self._first_noise = guide, guide.noise_factor
        row = guide.subset.size * guide.loc.element_size()
        free = available_memory(guide.loc.device) or 8 * 2**30
        fits = guide.num_data * row <= SHARE_OF_MEMORY * free
        self._data = LinearizedData(guide.at(), guide.passes, rows=fits)
        self._matrix: Tensor | None = None
        self._solver: Callable[[Tensor], Tensor] | None = None  # at one prior and noise
        self._offset = double(torch.zeros_like(guide.subset.take(guide.loc)))

    @property
    def _noise(self) -> Tensor:
        """The guide's ``noise_factor`` of the outputs: that of the pass that kept them."""
        return self._first_noise if self._data.keeps_all else self.guide.noise_factor

    @property
    def _factor(self) -> Tensor | float:
        """The present precision of the noise in units of that of the outputs."""
        if self.guide.reference_noise is None:
            return 1.0
        return double(self.guide.noise_factor / self._noise)

    def point(self, offset: Tensor) -> LinearizedPoint:
        """The point at an offset."""
        guide = self.guide
        here = self._data.sum(lambda part: part.log_likelihood(offset))
        if guide.reference_noise is None:
            return LinearizedPoint(offset.to(guide.loc), here, guide.squares)
        zero = torch.zeros_like(offset)
        start = self._data.sum(lambda part: part.log_likelihood(zero))
        # log lik = -1/2 c Q + 1/2 n log c + constant, at both points with the same c
        fallen = 2.0 * (start - here) / self._noise
        value = guide.log_likelihood - 0.5 * fallen
        return LinearizedPoint(offset.to(guide.loc), value, guide.squares + fallen)

    def _value_and_gradient(self, offset: Tensor) -> tuple[float, Tensor]:
        """The log joint density, up to what does not depend on the offset, and its gradient."""
        prior, of_prior = _log_prior(self.guide, offset)
        found = self._data.sum(lambda part: part.value_and_gradient(offset)) * self._factor
        return float(found[0] + prior), found[1:] + of_prior

    def _times(self, offset: Tensor, vector: Tensor) -> Tensor:
        """J' F J vector, at the noise of the outputs."""
        rounded = vector.to(self.guide.loc)
        return double(self._data.sum(lambda part: part.times(offset, rounded)))

    def _preconditioner(self, offset: Tensor) -> Callable[[Tensor], Tensor]:
        """About H^-1 x for x (p,): H of the first offset where it is small, else the guide's
        precision."""
        guide = self.guide
        if not self._data.rows or guide.subset.size > _DENSE_UP_TO:
            precision = guide.precision
            return lambda x: double(precision.precondition(x.to(guide.prior_diagonal)))
        if self._matrix is None:
            columns = torch.eye(guide.subset.size, device=guide.loc.device).split(_COLUMNS)
            self._matrix = torch.cat([self._times(offset, part) for part in columns])
        matrix = (self._factor * self._matrix).to(guide.prior_diagonal)
        full = FullPrecision(guide.prior.added_to(matrix))
        return lambda x: double(full.solve(x.to(matrix)))

    @torch.no_grad()
    def optimum(
        self, *, steps: int = _STEPS, tolerance: float = _TOLERANCE, products: int = _PRODUCTS
    ) -> LinearizedPoint:
        """The maximum under the guide's present prior and noise, from the maximum found before.

        Newton steps s, halved until they gain, with

            (J' F J + prior precision) s = gradient

        solved by conjugate gradients on products with J, the outputs' Fisher information F at the
        present point, and J'. The preconditioner decides how many products it takes, and not where
        the maximum is. With Normal observations and the full matrix one step is exact.

        :param steps: at most so many Newton steps.
        :param tolerance: the search ends where a step would gain less than this fraction of the log
            likelihood (or of one nat, where that is more), or than its rounding error.
        :param products: at most so many products with the Gauss-Newton matrix in a step.
        """
        offset, self._solver = self._offset, None
        value, gradient = self._value_and_gradient(offset)
        rounding = 10 * torch.finfo(self.guide.loc.dtype).eps * max(1.0, abs(value))
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
        self._offset = offset
        point = self.point(offset)
        point.gap, point.reached, point.steps = gap, reached, taken
        return point

    def _newton_step(
        self, offset: Tensor, gradient: Tensor, negligible: float, products: int
    ) -> tuple[Tensor, float]:
        """H^-1 gradient by conjugate gradients with H = J' F J + prior precision; and half the
        product of both, what the step gains."""
        factor, prior = self._factor, self.guide.prior
        solved = self._solver = self._solver or self._preconditioner(offset)
        step, residual = torch.zeros_like(gradient), gradient
        direction = conditioned = solved(residual)
        first = length = float(residual @ conditioned)
        gap = 0.0
        for number in range(products):
            if number == _FEW:
                self._matrix = self._solver = None  # it has become a bad one
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


def _log_prior(guide: LaplaceGuide, offset: Tensor) -> tuple[Tensor, Tensor]:
    """log p(T(u)) + log |det dT/du| at u* + offset, up to a constant, and its gradient (p,)."""
    prior = guide.prior
    if prior.quadratic:
        bent = prior.times(offset)
        slope = guide.prior_slope.to(offset)
        return (slope - 0.5 * bent) @ offset, slope - bent
    subset = guide.subset
    vector = subset.put(guide.loc, subset.take(guide.loc) + offset.to(guide.loc))
    run, leaves = run_at(guide.program_model, subset, vector, *guide.example_rows)
    value = log_prior(run, leaves, subset.layout).detach()
    return double(value), double(slope_of_prior(run, leaves, subset))

"""The linearized model: its optimum and its likelihood.

Around u* the observation's unconstrained parameters are eta(u*) + J (u - u*). For Normal
observations the evidence of this model is exact at its optimum under the prior. This optimum is
also a better point to evaluate the evidence than a u* from unfinished training (Antoran et al.
2022, section 3).
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.chunking import linearizations
from pyro_bdl.curvature.factor_statements import FactorStatements
from pyro_bdl.curvature.fisher import cell_columns
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.linear_outputs import LinearOutputs, observed_outputs
from pyro_bdl.curvature.prior import hyperpriors
from pyro_bdl.distributions.take_apart import base_distribution
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides.laplace import LaplaceGuide
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.trace import leave_open, record
from pyro_bdl.utils.memory import Allocations, available_memory
from pyro_bdl.utils.module_state import evaluation_mode, preserved_buffers

_STEPS = 20
_PRODUCTS = 200
_TOLERANCE = 1e-6
_HALVINGS = 30
_SHARE_OF_MEMORY = 0.125  # for the graphs of all data
_GRAPHS = 3  # that products keep: the run's, its transpose's and the values between

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
                total = total + count * _log_prob(outputs, outputs.moved(offset))
            value, slope = _factors(at, statements)
            total = total + count * (value + slope.double() @ offset.double())
    return total


def _log_prob(outputs: LinearOutputs, values: dict[str, Tensor]) -> Tensor:
    return outputs.observed(values).batch_log_prob().double()


@torch.enable_grad()
def _factors(at: Linearization, statements: FactorStatements) -> tuple[Tensor, Tensor]:
    """The value of the factors that a batch brings, and their gradient at u* in the subset."""
    statements.read(at.run, hyperpriors(at.run, at.leaves))
    total = at.vector.new_zeros((), dtype=torch.float64)
    slope = torch.zeros_like(at.subset.take(at.vector))
    for site in statements.new:
        total = total + site.batch_log_prob().double()
    if total.requires_grad:
        leaves = [at.leaves[name] for name in at.subset.parts]
        found = torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True)
        slope = at.subset.of_sites(found)
    return total.detach(), slope


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


class _Part:
    """Observations of one batch, linear in the subset, and its factors to first order."""

    def __init__(self, at: Linearization, statements: FactorStatements) -> None:
        self.outputs = list(observed_outputs(at).values())
        self.factors, self.slope = _factors(at, statements)
        self._at: Tensor | None = None
        self._values: list[dict[str, Tensor]] = []
        self._columns: list[list[dict[str, Tensor]]] | None = None
        self.held = False

    def values(self, offset: Tensor) -> list[dict[str, Tensor]]:
        """The outputs' values at an offset; those at the last one are kept."""
        if self._at is not offset:
            self._at, self._columns = offset, None
            still = not offset.any()
            self._values = [
                out.values
                if still
                else out.values | {k: out.values[k] + v for k, v in out.times(offset).items()}
                for out in self.outputs
            ]
        return self._values

    def log_likelihood(self, offset: Tensor) -> Tensor:
        total = self.factors + self.slope.double() @ offset.double()
        for outputs, values in zip(self.outputs, self.values(offset), strict=True):
            total = total + _log_prob(outputs, values)
        return total

    def gradient(self, offset: Tensor) -> Tensor:
        result = self.slope.double()
        for outputs, values in zip(self.outputs, self.values(offset), strict=True):
            leaves = {key: values[key].detach().requires_grad_() for key in outputs.moving}
            if not leaves:
                continue
            with torch.enable_grad():
                total = _log_prob(outputs, values | leaves)
                found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
            cotangents = dict(zip(leaves, found, strict=True))
            result = result + outputs.transposed_times(cotangents).double()
        return result

    def times(self, offset: Tensor, vector: Tensor) -> Tensor:
        """J' F J vector, F the Fisher information of the outputs at the offset."""
        result = torch.zeros_like(vector)
        values = self.values(offset)
        if self.held and self._columns is None:
            self._columns = [
                list(outputs.unconstrained(at, cell_columns)) if outputs.moving else []
                for outputs, at in zip(self.outputs, values, strict=True)
            ]
        for number, outputs in enumerate(self.outputs):
            if not outputs.moving:
                continue
            change = outputs.times(vector)
            columns = (
                outputs.unconstrained(values[number], cell_columns)
                if self._columns is None
                else self._columns[number]
            )
            weighed = {key: torch.zeros_like(value) for key, value in change.items()}
            for column in columns:
                share = _by_cell(outputs, column, change)
                for key, value in column.items():
                    weighed[key] += value * share.reshape(
                        share.shape + (1,) * (value.dim() - share.dim())
                    )
            result = result + outputs.transposed_times(weighed).to(vector)
        return result


def _by_cell(
    outputs: LinearOutputs, column: dict[str, Tensor], change: dict[str, Tensor]
) -> Tensor:
    """<column, change> in every cell of an observed site, of its batch shape."""
    cells = _cells(outputs)
    terms = [(value * change[key]).reshape(*cells, -1).sum(-1) for key, value in column.items()]
    return torch.stack(terms).sum(0)


class LinearizedModel:
    """log p(y, u* + d) of a guide's program with its outputs linear in d, as a function of d (p,).

    The prior is as it is. Where the noise of a Normal observation changes, the model follows the
    guide. The graphs of the data are kept where they fit in an eighth of the free memory; else
    every product runs the program again.

    :raises NotImplementedError: for observations that are not made of tensors.
    """

    def __init__(self, guide: LaplaceGuide) -> None:
        self.guide = guide
        self._loc, self._built = guide.loc, guide.noise_factor
        self._kept: dict[int, list[_Part]] = {}
        self._start: Tensor | None = None

    @property
    def stale(self) -> bool:
        """True where the guide has moved to another point."""
        return self.guide.loc is not self._loc

    def _parts(self, number: int, batches: Batches) -> Iterator[_Part]:
        if number in self._kept:
            yield from self._kept[number]
            return
        guide, statements = self.guide, FactorStatements()
        found = iter(
            linearizations(guide.program_model, guide.subset, guide.loc, batches.part(), None)
        )
        free = available_memory(guide.loc.device) or 8 * 2**30
        left = free * _SHARE_OF_MEMORY
        kept: list[_Part] | None = []
        per_part = 0.0
        while True:
            with Allocations() as allocations:
                at = next(found, None)
            if at is None:
                break
            part = _Part(at, statements)
            per_part = max(per_part, _GRAPHS * allocations.bytes + _of_columns(part))
            left -= per_part
            if kept is not None and left > 0:
                part.held = True
                kept.append(part)
            else:
                kept = None
            yield part
        if kept is not None:
            self._kept[number] = kept

    def _sum(self, of_part: Callable[[_Part], Tensor]) -> Tensor:
        """A sum over all data."""
        results = []
        for number, (batches, count) in enumerate(self.guide.passes):

            def one_pass(number: int = number, batches: Batches = batches) -> Tensor:
                total: Tensor | None = None
                for part in self._parts(number, batches):
                    found = of_part(part)
                    total = found if total is None else total + found
                assert total is not None
                return total

            total = batches.together(one_pass)
            batches.add_up(total)
            results.append(count * total)
        return torch.stack(results).sum(0)

    @property
    def _factor(self) -> Tensor | float:
        """The present precision of the noise in units of that at which the outputs were read."""
        if self.guide.reference_noise is None:
            return 1.0
        return (self.guide.noise_factor / self._built).double()

    def point(self, offset: Tensor) -> LinearizedPoint:
        """The point at an offset."""
        guide = self.guide
        here = self._sum(lambda part: part.log_likelihood(offset))
        if guide.reference_noise is None:
            return LinearizedPoint(offset.to(guide.loc), here, guide.squares)
        if self._start is None:
            zero = torch.zeros_like(offset)
            self._start = self._sum(lambda part: part.log_likelihood(zero))
        # log lik = -1/2 c Q + 1/2 n log c + constant, at both points with the same c
        fallen = 2.0 * (self._start - here) / self._built
        value = guide.log_likelihood - 0.5 * fallen
        return LinearizedPoint(offset.to(guide.loc), value, guide.squares + fallen)

    def _value_and_gradient(self, offset: Tensor) -> tuple[float, Tensor]:
        """The log joint density, up to what does not depend on the offset, and its gradient."""
        prior, of_prior = _log_prior(self.guide, offset)

        def both(part: _Part) -> Tensor:
            return torch.cat([part.log_likelihood(offset)[None], part.gradient(offset)])

        found = self._sum(both) * self._factor
        return float(found[0] + prior), found[1:] + of_prior

    def _times(self, offset: Tensor, vector: Tensor) -> Tensor:
        """J' F J vector, at the noise at which the outputs were read."""
        rounded = vector.to(self.guide.loc)
        return self._sum(lambda part: part.times(offset, rounded)).double()

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
            return precision.solve(x.to(guide.prior_diagonal)).double()

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


def _of_columns(part: _Part) -> float:
    """Bytes of the columns of a part's Fisher information."""
    total = 0.0
    for outputs in part.outputs:
        numbers, cells = outputs.mean.numel(), max(1, _cells(outputs).numel())
        total += numbers * max(1.0, numbers / cells) * outputs.mean.element_size()
    return total


def _cells(outputs: LinearOutputs) -> torch.Size:
    """The batch shape of an observed site."""
    assert outputs.site is not None
    base: Any = base_distribution(outputs.site.distribution)
    return torch.Size(base.batch_shape)


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
        with evaluation_mode(model), preserved_buffers(model):
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

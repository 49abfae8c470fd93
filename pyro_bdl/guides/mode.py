"""The mode of p(y, u) in a subset of the latents, by Newton steps with a Gaussian's precision; and
a check of a Laplace approximation's maximum, by the gain that such a step would still have."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_bdl.curvature.hyperparameters import ParameterReading
from pyro_bdl.curvature.prior import FactorStatements, hyperpriors, log_prior
from pyro_bdl.errors import warn
from pyro_bdl.program.trace import record, sum_out_discrete
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.precision import double, double_device

if TYPE_CHECKING:
    from pyro_bdl.guides.gaussian import LaplaceGuide


STEPS = 100
_HALVINGS = 30
_SMALLEST = 1e-30  # of squares that are divided by
_LENGTHS = (1.0, 0.1, 0.01)  # of a step, up to where the density is finite


@torch.no_grad()
def find_mode(guide: Any, *, steps: int = STEPS, progress: bool | None = None) -> None:
    """Move a ``LaplaceGuide`` to the maximum of log p(y, u) in its subset, given other latents.

    Each step takes a pass over the data; a step that does not increase the density is halved. One
    step is enough for a quadratic log density. Of a last layer with classes or rates, whose
    Gauss-Newton matrix is the Hessian, it takes a few steps; others (StudentT, noise that depends
    on x) converge more slowly.

    :param steps: the largest number of steps; a warning says if they do not suffice.
    :raises ValueError: for a gradient that is not finite.
    :param progress: show a bar over batches, in every pass; by default in terminals and
        notebooks.
    """
    eps = torch.finfo(guide.loc.dtype).eps
    before, value = float("inf"), sum(log_joint(guide, guide.loc))
    for _ in range(steps):
        gradient = guide.gradient()
        step = guide.newton_step(gradient)
        gain = 0.5 * float((double(step) * double(gradient)).sum())
        if not math.isfinite(gain):
            raise ValueError(
                "the gradient of the log density is not finite at the weights, so that there is no "
                "step to the mode: train again from other weights"
            )
        rounding = 1e3 * eps * max(1.0, abs(value))
        is_slow = gain > 0.1 * before  # slower than quadratic convergence
        if gain <= eps**1.25 or (gain < rounding and is_slow):
            return
        if gain > rounding:  # a smaller gain is lost in rounding
            step, value = _halved(guide, step, value)
        guide.loc = guide.subset.put(guide.loc, guide.subset.take(guide.loc) + step)
        guide.fit([batches for batches, _ in guide.passes], progress)
        before = gain
    if steps > 1:
        warn(
            f"the mode was not reached in {steps} steps: the last one gained {gain:.3g} nats",
            "not-at-a-maximum",
        )


def _halved(guide: Any, step: Tensor, value: float) -> tuple[Tensor, float]:
    """The longest of the step, its half, its quarter, ... that increases the density; its value
    there."""
    start = guide.subset.take(guide.loc)
    for _ in range(_HALVINGS):
        moved = sum(log_joint(guide, guide.subset.put(guide.loc, start + step)))
        if moved > value:
            return step, moved
        step = 0.5 * step
    return step, value


@torch.no_grad()
def log_joint(
    guide: Any, vector: Tensor, hyperprior_names: Iterable[str] = ()
) -> tuple[float, float]:
    """The tempered log p(y | w), and log p(w) + log |det dw/du|, in nats at a vector (P,), by a
    pass over a ``LaplaceGuide``'s data.

    :param hyperprior_names: names of factors that are part of neither.
    """
    layout = guide.require_layout()
    leaves = layout.unflatten(vector)
    values, total, prior = layout.to_supports(leaves), 0.0, math.nan
    with evaluation_mode(guide.program_modules):
        for number, (batches, factor) in enumerate(guide.passes):
            statements = FactorStatements(batches.ranks, earlier=number > 0)
            part = torch.zeros((), dtype=torch.float64, device=double_device(vector.device))
            for args, kwargs in batches.part():
                run = record(guide.program_model, values, args, kwargs, draw=sum_out_discrete)
                statements.read(run, hyperprior_names)
                for site in (*run.observed.values(), *statements.new):
                    part = part + double(site.batch_log_prob())
                prior = float(log_prior(run, leaves, layout)) if math.isnan(prior) else prior
            batches.add_up(part)
            total += factor * float(part)
    return total, prior


def check_maximum(guide: "LaplaceGuide", reading: ParameterReading) -> None:
    """Warn, once for a program, if a Newton step would still gain a lot under this prior and under
    any other scale s of it: weight decay is such a scale.

    With the gradients l of the log likelihood and r of the log prior the gain is

        1/2 (l + s r)' C (l + s r) = KL(N(u*, C) || N(u* + C (l + s r), C)),

    exact where the log density is quadratic and C its inverse curvature. The limit is one nat, and
    a tenth of one for every number: the mean of (u - mode)' C^-1 (u - mode) under the guide is then
    larger by a fifth. Beyond it, a pass over the data measures what the step does gain, since C may
    lack what a structure leaves out.
    """
    topic, size, slope = "not at a maximum", guide.subset.size, guide.prior_slope.to(guide.loc)
    if topic in guide.warned_of:
        return
    likelihood = guide.gradient() - slope
    steps, products = _newton(guide, torch.stack([likelihood, slope]))
    (a, b), (_, c) = products.tolist()
    scale = max(0.0, -b / max(c, _SMALLEST)) if size > 1 else 1.0
    rate, limit = a + 2.0 * scale * b + scale**2 * c, 1.0 + 0.1 * size
    if not 0.5 * rate > limit:
        return
    gain = _gain_along(guide, reading, steps[0] + scale * steps[1], rate, scale)
    if not gain > limit:
        return
    guide.warned_of.add(topic)
    scaled = ", whatever the scale of the prior" if size > 1 else ""
    warn(
        f"the guide is not at a maximum, a step would gain {gain:.3g} nats{scaled}: train "
        "longer, with a learning rate that falls to zero (and with BatchNorm layers in evaluation "
        "mode, as here), or let rows that a trained network has not seen choose the width, "
        "laplace_approximation(data, held_out=(x, y))",
        "not-at-a-maximum",
    )


def _newton(guide: "LaplaceGuide", gradients: Tensor) -> tuple[Tensor, Tensor]:
    """C g of gradients (k, p), and the products g' C g (k, k) in float64."""
    precision: Any = guide.precision
    if guide.curvature.is_sampled:  # the covariance of its samples, which takes no pass
        draws = precision.samples
        along = double(draws) @ double(gradients).mT
        steps = (along.mT @ double(draws)).to(gradients) / len(draws)
        return steps, along.mT @ along / len(draws)
    steps = torch.stack([guide.newton_step(gradient) for gradient in gradients])
    return steps, double(gradients) @ double(steps).mT


def _gain_along(
    guide: "LaplaceGuide", reading: ParameterReading, step: Tensor, rate: float, scale: float
) -> float:
    """About the largest rise of log p(y | u) + scale log p(u) along a step (p,), in nats: that of
    the parabola through the start and the step's end, exact for a quadratic density.

    :param rate: its derivative along the step at the start.
    """
    run, leaves = reading.run, reading.leaves
    layout, hyperprior_names = guide.require_layout(), hyperpriors(run, leaves)
    prior = float(log_prior(run, leaves, layout).detach())
    start = guide.subset.take(guide.loc)
    for length in _LENGTHS:
        moved = guide.subset.put(guide.loc, start + length * step)
        ends = log_joint(guide, moved, hyperprior_names)
        rise = ends[0] - float(guide.log_likelihood) + scale * (ends[1] - prior)
        if math.isfinite(rise):
            bend = 2.0 * (rate * length - rise) / length**2
            return 0.5 * rate**2 / bend if bend > 0.0 else rise
    return 0.0

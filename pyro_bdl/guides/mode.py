"""The mode of p(y, u) in a subset of the latents, by Newton steps with a Gaussian's precision."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.likelihood_sums import FactorStatements
from pyro_bdl.curvature.prior import log_prior
from pyro_bdl.errors import warn
from pyro_bdl.program.trace import record, sum_out_discrete
from pyro_bdl.utils.module_state import evaluation_mode

STEPS = 100
_HALVINGS = 30


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
        gain = 0.5 * float((step.double() * gradient.double()).sum())
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
            stacklevel=3,
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
def log_joint(guide: Any, vector: Tensor, apart: Iterable[str] = ()) -> tuple[float, float]:
    """The tempered log p(y | w), and log p(w) + log |det dw/du|, in nats at a vector (P,), by a
    pass over a ``LaplaceGuide``'s data.

    :param apart: names of factors that are part of neither.
    """
    layout = guide.require_layout()
    leaves = layout.unflatten(vector)
    values, total, prior = layout.to_supports(leaves), 0.0, math.nan
    with evaluation_mode(guide.program_modules):
        for number, (batches, factor) in enumerate(guide.passes):
            statements = FactorStatements(batches.ranks, earlier=number > 0)
            part = torch.zeros((), dtype=torch.float64, device=vector.device)
            for args, kwargs in batches.part():
                run = record(guide.program_model, values, args, kwargs, draw=sum_out_discrete)
                statements.read(run, apart)
                for site in (*run.observed.values(), *statements.new):
                    part = part + site.batch_log_prob().double()
                prior = float(log_prior(run, leaves, layout)) if math.isnan(prior) else prior
            batches.add_up(part)
            total += factor * float(part)
    return total, prior

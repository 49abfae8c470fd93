"""Check of a Laplace approximation's maximum: the gain that a Newton step would still have."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_bdl.curvature.hyperparameters import ParameterReading
from pyro_bdl.curvature.prior import hyperpriors, log_prior
from pyro_bdl.errors import warn
from pyro_bdl.guides.mode import log_joint

if TYPE_CHECKING:
    from pyro_bdl.guides.gaussian import LaplaceGuide

_SMALLEST = 1e-30  # of squares that are divided by
_LENGTHS = (1.0, 0.1, 0.01)  # of a step, up to where the density is finite


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
    if topic in guide.told:
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
    guide.told.add(topic)
    scaled = ", whatever the scale of the prior" if size > 1 else ""
    warn(
        f"the guide is not at a maximum, a step would gain {gain:.3g} nats{scaled}: train "
        "longer, with a learning rate that falls to zero (and with BatchNorm layers in evaluation "
        "mode, as here), or let rows that a trained network has not seen choose the width, "
        "laplace_approximation(data, held_out=(x, y))",
        "not-at-a-maximum",
        stacklevel=5,
    )


def _newton(guide: "LaplaceGuide", gradients: Tensor) -> tuple[Tensor, Tensor]:
    """C g of gradients (k, p), and the products g' C g (k, k) in float64."""
    precision: Any = guide.precision
    if guide.curvature.is_sampled:  # the covariance of its samples, which takes no pass
        draws = precision.samples
        along = draws.double() @ gradients.double().mT
        steps = (along.mT @ draws.double()).to(gradients) / len(draws)
        return steps, along.mT @ along / len(draws)
    steps = torch.stack([guide.newton_step(gradient) for gradient in gradients])
    return steps, gradients.double() @ steps.double().mT


def _gain_along(
    guide: "LaplaceGuide", reading: ParameterReading, step: Tensor, rate: float, scale: float
) -> float:
    """About the largest rise of log p(y | u) + scale log p(u) along a step (p,), in nats: that of
    the parabola through the start and the step's end, exact for a quadratic density.

    :param rate: its derivative along the step at the start.
    """
    run, leaves = reading.run, reading.leaves
    layout, apart = guide.require_layout(), hyperpriors(run, leaves)
    prior = float(log_prior(run, leaves, layout).detach())
    start = guide.subset.take(guide.loc)
    for length in _LENGTHS:
        moved = guide.subset.put(guide.loc, start + length * step)
        ends = log_joint(guide, moved, apart)
        rise = ends[0] - float(guide.log_likelihood) + scale * (ends[1] - prior)
        if math.isfinite(rise):
            bend = 2.0 * (rate * length - rise) / length**2
            return 0.5 * rate**2 / bend if bend > 0.0 else rise
    return 0.0

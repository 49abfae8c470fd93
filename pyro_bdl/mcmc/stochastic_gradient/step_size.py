"""A step size from the curvature of the log density."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.mcmc.starts import Restriction, starting_vectors
from pyro_bdl.mcmc.stochastic_gradient.minibatches import MinibatchSource
from pyro_bdl.mcmc.stochastic_gradient.sampling import checked_restriction
from pyro_bdl.utils.module_state import evaluation_mode, vmappable
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.validation import whole_number

_MOST_ITERATIONS = 100
_TOLERANCE = 0.01


def suggest_step_size(
    model: Callable,
    data: Any,
    *,
    at: Any,
    fraction: float = 0.1,
    num_points: int = 1,
    batch_size: int | None = None,
    seed: int = 0,
) -> float:
    """A step size eps = fraction / lambda for ``sgmcmc``, with lambda the largest curvature.

    lambda is the largest absolute eigenvalue of the Hessian of log p(u, y) in the unconstrained
    latents, at points ``at`` of high posterior density, on all data or on the first minibatch. For
    a Normal posterior, Langevin dynamics is stable up to fraction 2, and its variance is too large
    by at most the factor 1 / (1 - fraction / 2); "sghmc" is stable up to fraction 4.

    :param model: a Pyro program with continuous latents.
    :param data: see ``sgmcmc``, which also explains ``batch_size``.
    :param at: the points: a trained guide or ``Samples`` (draws), or a dict of latents. At draws
        the curvature can be many times that of the MAP.
    :param fraction: positive.
    :param num_points: the number of draws; lambda is the largest curvature at any of them.
    :returns: the step size.
    :raises ValueError: as ``sgmcmc``; for a fraction that is not positive.
    """
    if not fraction > 0:
        raise ValueError(f"fraction must be positive, got {fraction}")
    with evaluation_mode(model, at), seeded(seed):
        batches = MinibatchSource(data, batch_size)
        restriction = checked_restriction(model, batches, None)
        vectors = starting_vectors(restriction, at, whole_number(num_points, "num_points"))
        return fraction / max(largest_curvature(restriction, vector) for vector in vectors)


def largest_curvature(restriction: Restriction, vector: Tensor) -> float:
    """The largest absolute eigenvalue of the log density's Hessian at a vector (p,).

    By power iteration, to one percent.
    """
    leaf = vector.detach().requires_grad_()
    with torch.enable_grad(), vmappable():  # fused attention has no second derivative
        (gradient,) = torch.autograd.grad(restriction.log_density(leaf), leaf, create_graph=True)
    direction = torch.randn_like(vector)
    previous = 0.0
    for _ in range(_MOST_ITERATIONS):
        direction = direction / direction.norm()
        (direction,) = torch.autograd.grad(gradient, leaf, direction, retain_graph=True)
        value = float(direction.norm())
        if abs(value - previous) <= _TOLERANCE * value / 10:
            break
        previous = value
    return value

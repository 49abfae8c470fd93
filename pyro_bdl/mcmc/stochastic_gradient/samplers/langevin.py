"""Overdamped Langevin dynamics (SGLD).

    theta' = theta + eps grad log p(theta) + sqrt(2 eps T) xi,    xi ~ Normal(0, I)

For a Normal target with precision L the stationary covariance is T (L - eps L^2 / 2)^-1. It is
exact as eps -> 0, else too large by the factor 1 / (1 - eps L / 2). For eps >= 2 / L the chain
diverges.

Source: Welling & Teh (2011), Bayesian learning via stochastic gradient Langevin dynamics, with
eps for their eps / 2.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class LangevinState(NamedTuple):
    """The positions of the chains.

    :param position: (chains, P).
    """

    position: Tensor


def init(position: Tensor) -> LangevinState:
    return LangevinState(position)


def update(
    state: LangevinState, gradient: Tensor, step_size: float, *, temperature: float = 1.0
) -> LangevinState:
    """Move every chain by one step.

    :param gradient: of log p(theta), (chains, P).
    :param step_size: eps.
    :param temperature: T.
    """
    position = torch.add(state.position, gradient, alpha=step_size)
    if temperature:
        noise = torch.randn_like(position)
        position.add_(noise, alpha=math.sqrt(2 * step_size * temperature))
    return LangevinState(position)

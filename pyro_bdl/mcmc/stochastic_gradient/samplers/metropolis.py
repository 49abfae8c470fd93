"""The Metropolis correction of a Langevin step (MALA), which is exact at every step size.

    alpha = min(1, (p(theta') / p(theta))^(1/T) q(theta | theta') / q(theta' | theta))
    q(theta' | theta) = Normal(theta + eps grad log p(theta), 2 eps T I)

Source: Roberts & Tweedie (1996), Exponential convergence of Langevin distributions and their
discrete approximations, section 1.4.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_bdl.utils.random_state import uniform_like


class Point(NamedTuple):
    """Positions of the chains, and the log density there.

    :param position: (chains, P).
    :param log_density: (chains,).
    :param gradient: of the log density, (chains, P).
    """

    position: Tensor
    log_density: Tensor
    gradient: Tensor


def correct(
    before: Point, proposed: Point, step_size: float, *, temperature: float = 1.0
) -> tuple[Point, Tensor]:
    """Accept or reject each chain's proposal from ``langevin.update``.

    A proposal whose log density is not finite is rejected.

    :returns: the points of the chains, and the acceptance probabilities (chains,).
    """
    log_ratio = (proposed.log_density - before.log_density) / temperature
    log_ratio = log_ratio + _log_proposal(proposed, before, step_size, temperature)
    log_ratio = log_ratio - _log_proposal(before, proposed, step_size, temperature)
    log_ratio = log_ratio.where(proposed.log_density.isfinite(), -torch.inf)
    probability = log_ratio.clamp_max(0).exp().nan_to_num(0.0)
    accepted = uniform_like(probability) < probability
    column = accepted[:, None]
    kept = Point(
        torch.where(column, proposed.position, before.position),
        torch.where(accepted, proposed.log_density, before.log_density),
        torch.where(column, proposed.gradient, before.gradient),
    )
    return kept, probability


def _log_proposal(start: Point, end: Point, step_size: float, temperature: float) -> Tensor:
    """log q(end | start), up to a constant."""
    offset = torch.sub(end.position - start.position, start.gradient, alpha=step_size)
    return -offset.square().sum(-1) / (4 * step_size * temperature)

"""Supports of latent sites and of targets."""

from typing import Any

import torch
from pyro import poutine
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.layout import Latent, support_bounds, transform_of
from pyro_bdl.program.trace import Run
from pyro_bdl.utils.module_state import preserved_buffers
from pyro_bdl.utils.validation import listed


def check_fixed_supports(program: Any, latents: list[Latent]) -> None:
    """A support with tensor bounds must not move with the other latents."""
    bounded = [site for site in latents if support_bounds(site.support)]
    if not bounded or len(latents) < 2:
        return
    with torch.no_grad(), poutine.block(), preserved_buffers(program.model):
        elsewhere = program.constrain(program.unconstrain(program.initial) + 0.5)[0]
        again = program.run(elsewhere).latents
    for site in bounded:
        before, after = (
            support_bounds(site.support),
            support_bounds(again[site.name].distribution.support),
        )
        if any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            raise UnsupportedProgramError(
                f"the support of site '{site.name}' depends on other latents: sample it on a fixed "
                "support and rescale it in the program"
            )


def check_support(run: Run) -> None:
    """Supports with tensors for bounds are left out: these may move with the latents.

    :raises ValueError: naming site and rows, where a target is none that its distribution gives,
        such as a class that does not exist.
    """
    for name, site in run.observed.items():
        if site.value is None:
            continue
        distribution, masks = site.distribution, [site.mask]
        while isinstance(distribution, MaskedDistribution):
            masks.append(distribution._mask)
            distribution = distribution.base_dist
        support: Any = distribution.support
        if support_bounds(support):
            continue
        bad = ~support.check(_of_shape(distribution, site.value))
        for mask in masks:
            bad = bad if mask is None else bad & mask
        if not bad.any():
            continue
        where = f" in rows {listed(bad.nonzero()[:, 0].unique().tolist())}" if bad.dim() else ""
        raise ValueError(
            f"the targets of site '{name}' hold values outside the support of their distribution "
            f"({support}){where}: correct these targets"
        )


def feasible_value(fn: Any, radius: float = 0.0) -> Tensor:
    """A value in the support of a distribution that need not be one to draw from.

    :param radius: the unconstrained numbers are drawn uniformly from [-radius, radius].
    """
    transform, shape = transform_of(fn.support), fn.shape()
    if transform is not None:
        shape = transform.inverse_shape(shape)
    numbers = torch.empty(shape, device="cpu").uniform_(-radius, radius)
    return numbers if transform is None else transform(numbers)


def _of_shape(distribution: Any, value: Tensor) -> Tensor:
    """A value that broadcasts against a distribution, with the dimensions of its events."""
    missing = distribution.event_dim - value.dim()
    return value.expand(distribution.event_shape) if missing > 0 else value

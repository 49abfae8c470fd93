"""Marginal quantiles of guides."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_bdl.program.layout import Latent

if TYPE_CHECKING:
    from pyro_bdl.guides.base import Guide

DRAWS = 4096  # for quantiles without a closed form
_NUMBERS = 2**24  # in draws that are held at a time


def quantiles(guide: "Guide", levels: Tensor) -> dict[str, Tensor]:
    """Marginal quantiles of each site, site -> (levels, *shape).

    A transformation that increases each number alone maps the quantiles of the vector; for another,
    as onto a simplex, they are those of 4096 draws.
    """
    layout = guide.require_layout()
    result = layout.constrain(guide.vector_quantiles(levels))[0]
    for name, latent in layout.latents.items():
        if not _is_increasing(latent.transform):
            values = empirical_quantiles(_draws_of(guide, latent).flatten(1), levels)
            result[name] = values.reshape(len(levels), *latent.shape)
    return result


def empirical_quantiles(
    draws: Tensor, levels: Tensor, *, numbers_at_once: int = _NUMBERS
) -> Tensor:
    """Interpolated quantiles (levels, P) of draws (S, P), computed a few columns at a time.

    :param numbers_at_once: numbers that ``torch.quantile`` may hold; it refuses more than 2^24.
    """
    columns = max(1, numbers_at_once // (2 * len(draws)))
    return torch.cat([torch.quantile(part, levels, dim=0) for part in draws.split(columns, 1)], 1)


def _draws_of(guide: "Guide", latent: Latent) -> Tensor:
    """4096 draws of a site (4096, *shape), of which few whole vectors are held at a time."""
    layout, parts = guide.require_layout(), []
    most = max(1, _NUMBERS // layout.size)
    for start in range(0, DRAWS, most):
        vectors = guide.sample_vectors(min(most, DRAWS - start))
        parts.append(vectors[:, layout.slices[latent.name]].clone())
    draws = torch.cat(parts).reshape(DRAWS, *latent.unconstrained_shape)
    return draws if latent.transform is None else latent.transform(draws)


def _is_increasing(transform: Any) -> bool:
    """Return whether a transform maps numbers one by one, in their order."""
    try:
        sign = 1 if transform is None else transform.sign
    except NotImplementedError:
        return False
    return bool((sign > 0).all()) if isinstance(sign, Tensor) else sign > 0

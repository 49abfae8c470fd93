"""Sample statements of guides at the sites of a program."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.runtime import get_plates
from torch import Tensor
from torch.distributions import register_kl

from pyro_bdl.program.layout import Latent


class JointDelta(dist.Delta):
    """A Delta whose log density is a part of a joint density, so that no closed form may drop
    it."""


@register_kl(JointDelta, dist.Distribution)
def _no_closed_form(q: JointDelta, p: dist.Distribution) -> Tensor:
    raise NotImplementedError


def sample_all(guide: Any, args: tuple, kwargs: dict) -> dict[str, Tensor]:
    """Make a sample statement at every site of a guide with parameters; return site -> value.

    Independent sites have their own distributions. Sites that depend on each other are points of a
    joint draw, one for each cell of the plates around the guide, and the first of them carries the
    joint log density.
    """
    with guide.cached_parameters():
        vectors = guide.site_vectors()
        if vectors is not None:
            return sample_sites(guide, args, kwargs, *vectors)
        draws = vectors_in_plates(guide)
        log_q: Any = _joint_log_density(guide, draws)
    result: dict[str, Tensor] = {}
    for latent, (part,) in _sites(guide, args, kwargs, draws):
        q = _joint_point(latent, part, log_q, subsampled=latent.name in guide.subsampled)
        result[latent.name], log_q = sample_site(latent, q), None
    return result


def sample_sites(guide: Any, args: tuple, kwargs: dict, *vectors: Tensor) -> dict[str, Tensor]:
    """Sample each site from its own distribution.

    :param vectors: those of which ``guide.site_distribution`` takes slices.
    """
    return {
        latent.name: sample_site(latent, guide.site_distribution(latent, *parts))
        for latent, parts in _sites(guide, args, kwargs, *vectors)
    }


def vectors_in_plates(guide: Any, sample: Callable[[int], Tensor] | None = None) -> Tensor:
    """Draw one vector for each cell of the plates around the guide, (*plates, P).

    Pyro's vectorized particles are such a plate.

    :param sample: draws so many vectors; ``guide.sample_vectors`` by default.
    """
    sizes = {dim: frame.size for frame in get_plates() if (dim := frame.dim) is not None}
    shape = torch.Size([sizes.get(dim, 1) for dim in range(min(sizes, default=0), 0)])
    return (sample or guide.sample_vectors)(shape.numel()).reshape(*shape, -1)


def _sites(
    guide: Any, args: tuple, kwargs: dict, *vectors: Tensor
) -> Iterator[tuple[Latent, list[Tensor]]]:
    """Yield each site with its slices of the vectors; the site's plates are open meanwhile.

    :param vectors: (P,), or (*plates, P) with the plates around the guide.
    """
    layout = guide.require_layout()
    plates = guide._create_plates(*args, **kwargs)
    parts = [layout.unflatten(vector) for vector in vectors]
    for name, latent in layout.latents.items():
        values = [_aligned(part[name], latent) for part in parts]
        with ExitStack() as stack:
            for plate in latent.plates:
                rows = stack.enter_context(plates[plate])
                if name in guide.subsampled:
                    dim = plates[plate].dim - latent.unconstrained_event_dim
                    values = [_rows_of_plate(value, rows, dim) for value in values]
            yield latent, values


def sample_site(latent: Latent, distribution: Any) -> Tensor:
    """Make a guide's sample statement at a latent's site."""
    return pyro.sample(
        latent.name, distribution.to_event(latent.event_dim - distribution.event_dim)
    )


def point(latent: Latent, unconstrained: Tensor, *, change: bool = False) -> dist.Delta:
    """A point mass at w = T(u).

    :param unconstrained: u, the site's slice of the vector.
    :param change: whether its log density is -log |det dT/du| instead of 0.
    """
    if latent.transform is None:
        return dist.Delta(unconstrained, event_dim=latent.event_dim)
    value, density = latent.transform(unconstrained), 0.0
    if change:
        slopes = -latent.transform.log_abs_det_jacobian(unconstrained, value)
        batch = value.shape[: value.dim() - latent.event_dim]
        density = slopes.reshape(*batch, -1).sum(-1)
    return dist.Delta(value, log_density=density, event_dim=latent.event_dim)


def _joint_point(
    latent: Latent, unconstrained: Tensor, log_q: Tensor | None, *, subsampled: bool
) -> JointDelta:
    """A point that carries the density of a joint draw, or nothing.

    :param unconstrained: the site's slice of the draws, (*plates, *shape).
    :param log_q: the joint log density of each draw, (*plates); None at all sites but one.
    :param subsampled: whether the site's plate would scale the density.
    """
    value = unconstrained if latent.transform is None else latent.transform(unconstrained)
    if log_q is None:
        return JointDelta(value, log_density=0.0, event_dim=latent.event_dim)
    shape, draws = value.shape[: value.dim() - latent.event_dim], max(1, log_q.numel())
    density = log_q.expand(shape) / max(1, math.prod(shape) // draws)
    if subsampled:
        density = density * (unconstrained.numel() / (draws * latent.size))
    return JointDelta(value, log_density=density, event_dim=latent.event_dim)


def _aligned(value: Tensor, latent: Latent) -> Tensor:
    """Align an unconstrained value (*plates, *shape) with the plates around the guide.

    The batch dimensions of the shape replace the last plates, which have size one there.
    """
    outer = value.shape[: value.dim() - len(latent.unconstrained_shape)]
    batch = len(latent.unconstrained_shape) - latent.unconstrained_event_dim
    if not outer or not batch:
        return value
    if outer[-batch:].numel() > 1:
        raise ValueError(
            f"a plate around the guide has a dimension in which the site '{latent.name}' has its "
            "own: give that plate a dim to the left of all plates of the program, and declare "
            "other dimensions of the site by .to_event(...)"
        )
    return value.reshape(*outer[:-batch], *latent.unconstrained_shape)


def _rows_of_plate(value: Tensor, indices: Tensor, dim: int) -> Tensor:
    """The rows of a subsample, along a dimension counted from the right."""
    if value.shape[dim] == 1:
        return value
    return value.index_select(dim, indices.to(value.device))  # Pyro draws indices on the CPU


def _joint_log_density(guide: Any, vectors: Tensor) -> Tensor:
    """log q(w), (*plates), at vectors (*plates, P)."""
    log_dets = guide.require_layout().constrain(vectors)[1]
    if vectors.dim() == 1:
        return guide.log_density(vectors, log_dets)
    densities = torch.vmap(guide.log_density)(vectors.flatten(0, -2), log_dets.flatten())
    return densities.reshape(log_dets.shape)

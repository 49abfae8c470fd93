"""Guides with one joint distribution over the flat vector."""

import math
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import register_kl

from pyro_bdl.guides.base import Guide, sample_site
from pyro_bdl.guides.point import UnconstrainedMAP
from pyro_bdl.program.batches import Batch


class JointDelta(dist.Delta):
    """A Delta whose log density is a part of a joint density, so that no closed form may drop
    it."""


@register_kl(JointDelta, dist.Distribution)
def _no_closed_form(q: JointDelta, p: dist.Distribution) -> Tensor:
    raise NotImplementedError


class AutoJoint(Guide):
    """Base class of guides whose sites depend on each other.

    A subclass defines ``_create_parameters``, ``sample_vectors``, ``log_density``, ``location`` and
    ``variances``.
    """

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Emit a joint draw for each cell of the plates around the guide; the first site's Delta
        carries the joint log density."""
        self.prototype(*args, **kwargs)
        with self.reading():
            vectors = self._vectors_in_plates()
            log_q = self._log_densities(vectors)
        draws = max(1, log_q.numel())
        result: dict[str, Tensor] = {}
        for latent, (part,) in self._sites(args, kwargs, vectors):
            value = part if latent.transform is None else latent.transform(part)
            shape = value.shape[: value.dim() - latent.event_dim]
            density = log_q.expand(shape) / max(1, math.prod(shape) // draws) if not result else 0.0
            if latent.name in self.subsampled:  # its plate would scale the joint density
                density = density * (part.numel() / (draws * latent.size))
            result[latent.name] = sample_site(
                latent, JointDelta(value, log_density=density, event_dim=latent.event_dim)
            )
        return result

    def _log_densities(self, vectors: Tensor) -> Tensor:
        """log q(w), (*plates), at vectors (*plates, P)."""
        log_dets = self.require_layout().constrain(vectors)[1]
        if vectors.dim() == 1:
            return self.log_density(vectors, log_dets)
        densities = torch.vmap(self.log_density)(vectors.flatten(0, -2), log_dets.flatten())
        return densities.reshape(log_dets.shape)


class JointGuide(AutoJoint):
    """Base class of joint guides that are built around a trained guide.

    :param source: a trained guide for the same program; it is not changed.
    """

    def __init__(self, source: Guide) -> None:
        model = source.program_model
        super().__init__(model, create_plates=source.create_plates)
        self._take_structure(source)


def restored_source(model: Callable, batch: Batch) -> Guide:
    """A guide for a program, from which a joint guide of a file takes the layout."""
    args, kwargs = batch
    return UnconstrainedMAP(model).prototype(*args, **kwargs)

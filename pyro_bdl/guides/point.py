"""Point masses at the mode of p(w | y), or at the mode of the unconstrained vector's density."""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_bdl.guides.base import Guide, sample_site


class AutoMAP(Guide):
    """A point mass at w = T(m), whose ELBO is log p(y | w) + log p(w).

    The parameter is one flat vector ``loc`` (m, (P,), unconstrained units). As in Pyro's
    ``AutoDelta``, the optimum is the mode of the density over the constrained latents.

    :param model: a Pyro program with continuous latents.
    :param init_loc_fn: where m starts; by default the network's own values.
    :param create_plates: as in Pyro's autoguides.
    """

    normal_marginals = True

    def _create_parameters(self, start: Tensor) -> None:
        self.loc = nn.Parameter(start.clone())

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Emit a Delta at every site; returns site -> value."""
        self.prototype(*args, **kwargs)
        result = {}
        for latent, (loc,) in self._sites(args, kwargs, self.location()):
            value = loc if latent.transform is None else latent.transform(loc)
            result[latent.name] = sample_site(latent, dist.Delta(value, event_dim=latent.event_dim))
        return result

    @property
    def has_density(self) -> bool:
        return False

    def location(self) -> Tensor:
        return self._parameter("loc")

    def sample_vectors(self, num_samples: int) -> Tensor:
        return self.location().expand(num_samples, -1)

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        return torch.zeros_like(log_det)

    def variances(self) -> Tensor:
        """Zeros (P,)."""
        return torch.zeros_like(self.location())


class UnconstrainedMAP(AutoMAP):
    """Base class of guides that train the mode u* of the unconstrained vector.

    Its density is log p(T(u), y) + log |det dT/du|. Subclasses put a distribution around u*.
    """

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Emit a Delta at every site, with the log density -log |det dT/du|."""
        self.prototype(*args, **kwargs)
        return emit_point(self, self.location(), args, kwargs)

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        """-log |det dT/du|: a point mass, as an objective."""
        return -log_det


def emit_point(guide: Guide, vector: Tensor, args: tuple, kwargs: dict) -> dict[str, Tensor]:
    """Emit a Delta at every site, with the log density -log |det dT/du|; return site -> value.

    :param vector: unconstrained, (P,), or (*plates, P) with the plates around the guide.
    """
    result = {}
    for latent, (loc,) in guide._sites(args, kwargs, vector):
        value, density = loc, torch.zeros_like(loc)
        if latent.transform is not None:
            value = latent.transform(loc)
            density = -latent.transform.log_abs_det_jacobian(loc, value)
        batch = value.dim() - latent.event_dim
        density = density.reshape(*density.shape[:batch], -1).sum(-1)
        result[latent.name] = sample_site(
            latent, dist.Delta(value, log_density=density, event_dim=latent.event_dim)
        )
    return result

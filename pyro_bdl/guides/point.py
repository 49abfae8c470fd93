"""Maximum a posteriori: a point mass at the mode of p(w | y)."""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_bdl.guides.base import Guide, sample_site


class AutoMAP(Guide):
    """A point mass at T(m): its ELBO is log p(y | w) + log p(w) at w = T(m), w in its support.

    The parameter is one flat vector ``loc`` (m, unconstrained units) of length P. As in Pyro's
    ``AutoDelta`` the mode is that of the density over the constrained latents.

    :param model: a Pyro program with continuous latents.
    :param init_loc_fn: where m starts; by default the network's own values.
    :param create_plates: as in Pyro's autoguides.
    """

    def _create_parameters(self, start: Tensor) -> None:
        self.loc = nn.Parameter(start.clone())

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Emit a Delta at every site; returns site -> value."""
        self.prototype(*args, **kwargs)
        result = {}
        for latent, (loc,) in self._sites(args, kwargs, self.loc):
            value = loc if latent.transform is None else latent.transform(loc)
            result[latent.name] = sample_site(latent, dist.Delta(value, event_dim=latent.event_dim))
        return result

    def location(self) -> Tensor:
        return self._parameter("loc")

    def sample_vectors(self, num_samples: int) -> Tensor:
        return self.location().expand(num_samples, -1)

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        return torch.zeros_like(log_det)

    def variances(self) -> Tensor:
        """Zeros (P,)."""
        return torch.zeros_like(self.location())

    def vector_quantiles(self, levels: Tensor) -> Tensor:
        return self.location().expand(len(levels), -1)

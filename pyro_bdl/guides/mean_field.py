"""Mean-field variational inference: q(u) = prod_i Normal(u_i; m_i, s_i^2)."""

import math
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor, nn

from pyro_bdl.divergence import diagonal_normal_kl, marginal
from pyro_bdl.guides.base import Guide, sample_site
from pyro_bdl.init import init_to_network
from pyro_bdl.program import Run


class AutoMeanField(Guide):
    """Independent Normals over the unconstrained latents: u = m + s * eps, w = T(u).

    The guide emits each site's own distribution, Normal or transformed Normal, at the site
    itself, so that ELBOs with analytic KL terms are right on constrained sites too. Its
    parameters are two flat vectors of length P: ``loc`` (m, unconstrained units) and ``scale``
    (s > 0). Blundell et al. 2015; Kucukelbir et al. 2017.

    :param model: a Pyro program with continuous latents.
    :param init_loc_fn: where m starts; by default the network's own values.
    :param init_scale: where every s starts, in unconstrained units.
    :param create_plates: as in Pyro's autoguides.
    :raises ValueError: for an ``init_scale`` that is not positive and finite.
    """

    normal_marginals = True

    def __init__(
        self,
        model: Callable,
        *,
        init_loc_fn: Callable = init_to_network,
        init_scale: float = 0.05,
        create_plates: Callable | None = None,
    ) -> None:
        if not 0 < init_scale < math.inf:
            raise ValueError(f"init_scale must be positive and finite, got {init_scale}")
        super().__init__(model, init_loc_fn=init_loc_fn, create_plates=create_plates)
        self.init_scale = init_scale

    def _create_parameters(self, start: Tensor) -> None:
        self.loc = nn.Parameter(start.clone())
        self.scale = PyroParam(
            torch.full_like(start, self.init_scale), constraints.softplus_positive
        )

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every site; returns site -> value."""
        self.prototype(*args, **kwargs)
        return {
            latent.name: sample_site(latent, marginal(latent, loc, scale))
            for latent, (loc, scale) in self._sites(args, kwargs, *self._loc_and_scale())
        }

    def get_posterior(self, *args: Any, **kwargs: Any) -> dist.TorchDistribution:
        """q over the unconstrained vector (P,), a diagonal Normal."""
        self._prototype_if_given(args, kwargs)
        return dist.Normal(*self._loc_and_scale()).to_event(1)

    def _loc_and_scale(self) -> tuple[Tensor, Tensor]:
        return self._parameter("loc"), self._parameter("scale")

    def location(self) -> Tensor:
        return self._parameter("loc")

    def sample_vectors(self, num_samples: int) -> Tensor:
        loc, scale = self._loc_and_scale()
        noise = torch.randn(num_samples, len(loc), dtype=loc.dtype, device=loc.device)
        return torch.addcmul(loc, scale, noise)

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        return dist.Normal(*self._loc_and_scale()).log_prob(vector).sum(-1) - log_det

    def kl(self, vector: Tensor, log_det: Tensor, run: Run) -> Tensor:
        values = {name: site.value for name, site in run.latents.items()}
        return diagonal_normal_kl(
            self.require_layout(), *self._loc_and_scale(), values, run.latents
        )

    def entropy(self, vector: Tensor, log_det: Tensor) -> Tensor:
        return dist.Normal(*self._loc_and_scale()).entropy().sum() + log_det

    def variances(self) -> Tensor:
        """The marginal variances of the unconstrained vector (P,)."""
        return self._parameter("scale").square()

    def vector_quantiles(self, levels: Tensor) -> Tensor:
        loc, scale = self._loc_and_scale()
        return loc + scale * torch.special.ndtri(levels)[:, None]

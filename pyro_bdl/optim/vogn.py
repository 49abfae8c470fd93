"""VOGN: variational online Gauss-Newton, an ELBO and an optimiser that belong together."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.alignment import Alignment
from pyro_bdl.curvature.dense import DiagonalCurvature
from pyro_bdl.curvature.fit import site_jacobians
from pyro_bdl.curvature.linearize import Linearization
from pyro_bdl.curvature.recipe import Recipe
from pyro_bdl.curvature.subset import Subset
from pyro_bdl.elbo import Temperature, TemperedTraceMeanField_ELBO
from pyro_bdl.estimators import PerDatum
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.mean_field import AutoMeanField
from pyro_bdl.optim.base import NaturalGradient

_ROUNDING = 1e-3  # of a relative change whose terms almost cancel


class GaussNewton_ELBO(TemperedTraceMeanField_ELBO):
    """L(eta) whose gradient in the scales is by squared gradients of the data.

    The value is that of ``TemperedTraceMeanField_ELBO``. Where its gradient in the scale s of a
    mean-field guide has E_q[diag hess(-log p(y | w))] s, this one has sum_n g_n^2 s, with g_n the
    gradient of log p(y_n | w) at the draw, scaled by N / B: a Gauss-Newton approximation that is
    never negative, and much less noisy (Khan et al. 2018, section 3.1; Osawa et al. 2019).

    :param temperature: as for ``TemperedTraceMeanField_ELBO``, as are ``num_particles`` and
        ``cold_temperature``.
    :param curvature: "empirical-fisher", the squares; or "ggn", the Gauss-Newton matrix itself,
        which takes a pass for every output.
    :raises TypeError: at a step, for a guide without a location and scale.
    """

    def __init__(
        self,
        temperature: Temperature = 1.0,
        num_particles: int = 1,
        *,
        cold_temperature: Temperature | None = None,
        curvature: str = "empirical-fisher",
    ) -> None:
        super().__init__(temperature, num_particles, cold_temperature=cold_temperature)
        self.recipe = Recipe("diag", curvature)
        self._known: dict[Any, Alignment] = {}
        self._subset: Subset | None = None

    def flat_terms(
        self, model: Callable, guide: Guide, args: tuple, kwargs: dict, estimator: PerDatum | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not isinstance(guide, AutoMeanField):
            raise TypeError(
                f"GaussNewton_ELBO is for an AutoMeanField, got {type(guide).__name__}: use "
                "TemperedTraceMeanField_ELBO"
            )
        if estimator is not None:
            raise ValueError(
                f"GaussNewton_ELBO takes one draw for all data, and cannot use {estimator}"
            )
        layout = guide.require_layout()
        if self._subset is None or self._subset.layout is not layout:
            self._subset = Subset(layout)
        loc, scale = guide.loc_and_scale()
        particles = []
        vectors = guide.sample_vectors(self.num_particles)
        guide.last_noise = None  # the gradient in the scales comes from squares
        for vector in vectors.unbind():
            likelihood, kl, disorder = self.particle(model, guide, vector, args, kwargs)
            gradient, squares = self._read(model, vector, likelihood, args, kwargs)
            # Of value zero: the draw's gradient in loc and scale goes, what is wanted comes.
            change = torch.dot(gradient, loc - vector) - torch.dot(
                gradient, (loc - vector).detach()
            )
            change = change - 0.5 * torch.dot(squares, scale.square() - scale.detach().square())
            particles.append((likelihood + change, kl, disorder))
        likelihood, kl, disorder = (torch.stack(t).mean() for t in zip(*particles, strict=True))
        return likelihood, kl, disorder

    def _read(
        self, model: Callable, vector: Tensor, likelihood: Tensor, args: tuple, kwargs: dict
    ) -> tuple[Tensor, Tensor]:
        """The gradient of the log likelihood at a draw, and the sum of squares, both (P,)."""
        assert self._subset is not None
        if not likelihood.requires_grad:
            return torch.zeros_like(vector), torch.zeros_like(vector)
        (gradient,) = torch.autograd.grad(likelihood, [vector], retain_graph=True)
        at = Linearization(model, self._subset, vector, args, kwargs, known=self._known)
        squares = torch.zeros_like(gradient)
        for name, site in at.run.observed.items():
            curvature = DiagonalCurvature(len(vector), vector.detach())
            for jacobian in site_jacobians(at, name, self.recipe):
                curvature.add(jacobian)
            squares += site.subsampling * curvature.diagonal()
        return gradient, squares


class VOGN(NaturalGradient):
    """Variational online Gauss-Newton (Khan et al. 2018, equations 9 and 10; Osawa et al. 2019).

    With the loss of a ``GaussNewton_ELBO``, whose squared gradients make S' positive,

        S <- S + (1 - b2) (S' - S),   m <- m - lr clip(g / ((1 - b1^t) eta S))

    in the notation of ``IVON``, as are the parameters.
    """

    def __init__(
        self,
        guide: AutoMeanField,
        *,
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.99),
        temperature: float = 1.0,
        clip: float = 10.0,
    ) -> None:
        super().__init__(guide, lr=lr, betas=betas, temperature=temperature, clip=clip)

    def growth(self, change: Tensor, rate: float) -> Tensor:
        if (change < -1.0 - _ROUNDING).any():
            raise RuntimeError(
                "the precision asked for is negative: train VOGN with the loss of a "
                "GaussNewton_ELBO, or use IVON"
            )
        return 1.0 + rate * change

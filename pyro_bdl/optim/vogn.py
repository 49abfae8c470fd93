"""VOGN, variational online Gauss-Newton: an ELBO and an optimizer to be used together."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_bdl.curvature.at import ProgramAtPoint
from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.fit import site_jacobians
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.structures import structure_of
from pyro_bdl.curvature.structures.diagonal import DiagonalCurvature
from pyro_bdl.elbo.draw import FlatDraw
from pyro_bdl.elbo.step import Terms
from pyro_bdl.elbo.tempered import Temperature, TemperedTraceMeanField_ELBO
from pyro_bdl.estimators import PerDatum
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.mean_field import AutoMeanField
from pyro_bdl.optim.base import DiagonalNaturalGradient
from pyro_bdl.program.rows import rows_of
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import record, sum_out_discrete
from pyro_bdl.utils.autograd import leaves_behind
from pyro_bdl.utils.random_state import own_randomness
from pyro_bdl.utils.validation import require

_ROUNDING = 1e-3  # relative rounding error of a change whose terms almost cancel


class GaussNewton_ELBO(TemperedTraceMeanField_ELBO):
    """L(eta) with a gradient in the scales from squared per-datum gradients.

    The value is that of ``TemperedTraceMeanField_ELBO``. The gradient in the scale s of a
    mean-field guide contains sum_n g_n^2 s instead of E_q[diag hess(-log p(y | w))] s, with g_n the
    gradient of log p(y_n | w) at the draw, scaled by N / B. This Gauss-Newton approximation is
    never negative and much less noisy (Khan et al. 2018, section 3.1; Osawa et al. 2019).

    The target y_n in g_n is drawn from p(y | w), so that E[g_n^2] is the diagonal of the
    Gauss-Newton matrix. With the observed target ("empirical-fisher", as in these papers) g_n^2
    contains the squared residual. Its sum differs from the Gauss-Newton matrix even for a linear
    model, by the chance of the data and by any misfit, and no number of steps averages this out
    (Kunstner, Balles & Hennig 2019).

    The value is that of the program in its modules' modes, the squares are those of evaluation
    mode. After the first pass over the data, a program all of whose modules are in evaluation mode
    runs once a step for both, and any other one twice.

    :param temperature: see ``TemperedTraceMeanField_ELBO``, which also explains ``num_particles``
        and ``cold_temperature``.
    :param curvature: "ggn-mc" for squared gradients of drawn targets, "empirical-fisher" for those
        of the observed ones, which saves a backward pass, or "ggn" for the Gauss-Newton matrix,
        which takes a backward pass for every output.
    :param rows: "together" for a program whose rows of data depend on each other, see
        ``AutoLaplaceGGN``.
    :raises TypeError: at a step, for a guide without a location and scale.
    """

    family: ClassVar[type[Guide]] = AutoMeanField
    structure: ClassVar[str] = "diag"

    def __init__(
        self,
        temperature: Temperature = 1.0,
        num_particles: int = 1,
        *,
        cold_temperature: Temperature | None = None,
        curvature: str = "ggn-mc",
        rows: str = "alone",
    ) -> None:
        super().__init__(temperature, num_particles, cold_temperature=cold_temperature)
        self.config = CurvatureConfig(structure_of(self.structure), curvature, rows=rows)
        self._point: ProgramAtPoint | None = None

    def flat_terms(
        self, model: Callable, guide: Guide, args: tuple, kwargs: dict, estimator: PerDatum | None
    ) -> Terms:
        name = type(self).__name__
        text = f"{name} is for an {self.family.__name__} (else use TemperedTraceMeanField_ELBO)"
        require(guide, self.family, text)
        if estimator is not None:
            raise ValueError(f"{name} takes one draw for all data, and cannot use {estimator}")
        layout = guide.require_layout()
        if self._point is None or self._point.subset.layout is not layout:
            rows, modules = rows_of(model, self), guide.program_modules
            self._point = ProgramAtPoint(model, Subset(layout), guide.location(), rows, modules)
        vectors = guide.sample_vectors(self.num_particles)
        particles = [self._at(model, guide, vector, args, kwargs) for vector in vectors.unbind()]
        return Terms(*(torch.stack(t).mean() for t in zip(*particles, strict=True)))

    def _at(
        self, model: Callable, guide: Guide, vector: Tensor, args: tuple, kwargs: dict
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The terms at a draw; the log likelihood gets the gradient from squares."""
        point = self._point
        assert point is not None
        if not torch.is_grad_enabled():
            return self.particle(model, partial(FlatDraw, guide, vector), args, kwargs)
        due = point.is_due(args, kwargs)  # to be compared with rows together
        if due or any(module.training for module in guide.program_modules):
            with own_randomness():
                at = point.moved(vector).linearize(args, kwargs, compared=due)
            latents = point.subset.layout.constrain(vector)[0]
            run = record(model, latents, args, kwargs, draw=sum_out_discrete)
        else:  # in evaluation mode one run gives the value and the squares
            at = point.moved(vector, training=True).linearize(args, kwargs, compared=False)
            run = at.run
        total = self.log_likelihood(run, point.subset.layout.latents)
        likelihood = torch.as_tensor(total, device=vector.device)
        kl, q_entropy = self.divergence(FlatDraw(guide, vector), run)
        if likelihood.requires_grad:
            likelihood = self._with_squares(guide, vector, likelihood, at)
        return likelihood, kl, q_entropy

    def _with_squares(
        self, guide: Guide, vector: Tensor, likelihood: Tensor, at: Linearization
    ) -> Tensor:
        """The log likelihood with known gradients, so that ``backward`` does not run through the
        program.

        The gradients are g in the location, those of ``quadratic`` in the scales, and the exact
        ones in the program's parameters.
        """
        parameters = leaves_behind(likelihood, stop=[vector])
        wanted, targets = list(parameters), list(parameters)
        if vector.requires_grad:
            wanted, targets = [vector, *parameters], [guide.location(), *parameters]
        gradients = torch.autograd.grad(
            likelihood, wanted, retain_graph=True, materialize_grads=True, allow_unused=True
        )
        change = -self.quadratic(guide, at)
        for value, gradient in zip(targets, gradients, strict=True):
            change = change + (gradient * value).sum()
        return likelihood.detach() + (change - change.detach())

    def quadratic(self, guide: Any, at: Linearization) -> Tensor:
        """E_q[(u - m)' H (u - m)] / 2 for the curvature H, differentiable in the guide's scales."""
        squares = torch.zeros_like(at.vector)
        for name, site in at.run.observed.items():
            curvature = DiagonalCurvature(at.subset, at.vector)
            for jacobian in site_jacobians(at, name, self.config):
                curvature.add(jacobian)
            squares += site.subsampling * curvature.diagonal()
        _, scale = guide.loc_and_scale()
        return 0.5 * torch.dot(squares, scale.square())


class VOGN(DiagonalNaturalGradient):
    """Variational online Gauss-Newton (Khan et al. 2018, equations 9 and 10; Osawa et al. 2019).

    To be used with the loss of a ``GaussNewton_ELBO``, whose squared gradients make S' positive:

        S <- S + rho (S' - S),   m <- m - lr clip(g / ((1 - b1^t) eta S))

    Notation and parameters are those of ``IVON``.
    """

    def precision_ratio(self, change: Tensor, rate: float) -> Tensor:
        if (change < -1.0 - _ROUNDING).any():
            raise RuntimeError(
                "the precision asked for is negative: train VOGN with the loss of a "
                "GaussNewton_ELBO, or use IVON"
            )
        return 1.0 + rate * change

"""IVON: the improved variational online Newton method."""

import torch
from torch import Tensor

from pyro_bdl.guides.mean_field import AutoMeanField
from pyro_bdl.optim.base import NaturalGradient
from pyro_bdl.optim.natural_gradient import riemannian_growth


class IVON(NaturalGradient):
    """Natural-gradient variational inference at the cost of Adam, in its place.

    For the loss L of an ELBO (TemperedTrace_ELBO or another that draws by reparameterization) on
    an ``AutoMeanField`` with location m, scale s and precision S = 1/s^2:

        S' = S + (dL/ds - g e) / (eta s)
        S  <- S + rho (S' - S) + rho^2 (S' - S)^2 / (2 S),   rho = (1 - b2) sqrt(lr / l)
        g  <- b1 g + (1 - b1) dL/dm
        m  <- m - lr clip(g / ((1 - b1^t) eta S))

    S' is the reparameterized estimate of the expected Hessian, prior included; the quadratic term
    keeps S positive. With l the largest lr so far, S is averaged over more steps where a schedule
    lets lr fall, as m is.

    e is the draw's standard Normal noise and g the momentum before the step over 1 - b1^(t - 1), so
    that E[g e] = 0: dL/ds is the gradient at the draw times e, and what of that gradient is the
    same in every step is not noise of the Hessian. Without this control variate S grows to
    (1 - b2) (dL/dm)^2 / 2 far from the optimum, which holds the location back. Where the noise is
    not of the weights (local reparameterization, flipout, Pyro's own ELBOs) there is none.

    Without e, and with N data, S is the N (h + delta) of Shen et al. (2024), algorithm 1, and dL/dm
    their N (g + delta m), so that lr has the same meaning; momentum is taken of the whole gradient,
    and the scale of the start takes the place of their initial Hessian.

    :param guide: after ``guide.prototype``, one scale for each weight.
    :param lr: of the location; 1 is a Newton step. Torch's schedulers change it.
    :param betas: b1 of the momentum, b2 of the precision.
    :param temperature: eta of the ELBO (or T of its cold mode).
    :param clip: the location moves by at most lr * clip standard deviations in a step.
    :raises TypeError: for another kind of guide.
    :raises ValueError: for shared or fixed scales, a number out of range.
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
        guide.keeps_noise = True

    def steadied(self, scale_gradient: Tensor, momentum: Tensor, correction: float) -> Tensor:
        noise, self.guide.last_noise = self.guide.last_noise, None
        if noise is None:
            return scale_gradient
        return torch.addcmul(scale_gradient, momentum, noise, value=-correction)

    def growth(self, change: Tensor, rate: float) -> Tensor:
        return riemannian_growth(change, rate)

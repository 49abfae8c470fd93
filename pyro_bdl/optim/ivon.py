"""IVON: the improved variational online Newton method."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.optim.base import DiagonalNaturalGradient


class IVON(DiagonalNaturalGradient):
    """Natural-gradient variational inference at the cost of Adam, as a replacement for it.

    For the loss L of an ELBO (TemperedTrace_ELBO or another that draws by reparameterization) on
    an ``AutoMeanField`` with location m, scale s and precision S = 1/s^2:

        S' = S + (dL/ds - g e) / (eta s)
        S  <- S + rho (S' - S) + rho^2 (S' - S)^2 / (2 S),   rho = (1 - b2) sqrt(lr / l)
        g  <- b1 g + (1 - b1) dL/dm
        m  <- m - lr clip(g / ((1 - b1^t) eta S))

    S' is the reparameterized estimate of the expected Hessian, including the prior; the quadratic
    term keeps S positive (Lin, Schmidt & Khan 2020, equation 5). Since l is the largest lr so far,
    a falling lr averages S over more steps, as it does for m.

    The term g e is a control variate: e is the draw's standard Normal noise, and g in it is the
    momentum before the step divided by 1 - b1^(t - 1), so that E[g e] = 0. It is needed because
    dL/ds is the gradient at the draw times e, and a gradient that is the same in every step then
    acts as noise in the estimate of the Hessian. Without the term, S grows to (1 - b2) (dL/dm)^2 /
    2 far from the optimum, which slows the location down. The term is left out if e is not known
    (local reparameterization, flipout, Pyro's own ELBOs).

    The temperature eta is that of the ELBO (or T of its cold mode).

    Without this term, and with N data, S is N (h + delta) in algorithm 1 of Shen et al. (2024), and
    dL/dm is their N (g + delta m), so that lr has the same meaning. There are two differences: the
    momentum is taken of the whole gradient, and the initial scale replaces their initial Hessian.

    Gradients may be accumulated: ``backward(1 / k)`` and ``add`` of k steps of the ELBO, then one
    step. The noise e is then the mean over the k draws. Under ``torch.autocast`` draws, gradients
    and states stay in float32.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> guide = bdl.guides.AutoMeanField(model).prototype(x, y)
        >>> ivon = bdl.optim.IVON(guide, lr=0.1)
        >>> training = bdl.training.train(model, guide, x, y, steps=200, optimizer=ivon)
        >>> round(guide.median()["weight"].item(), 1)
        2.0

    :param guide: a guide with one scale for each weight, after ``guide.prototype``.
    :param lr: the learning rate of the location; 1 is a Newton step. Torch's schedulers can change
        it. With more weights than data take about 0.01: scales near the prior's make the curvature
        at draws far from diagonal, steps of 0.1 then leave the data, and ``train`` warns of it.
    :param betas: b1 of the momentum and b2 of the precision.
    :param clip: the location moves by at most lr * clip standard deviations in a step.
    :raises TypeError: for another class of guide.
    :raises ValueError: for shared or fixed scales, or a number out of range.
    """

    def control_variate(self, scale_gradient: Tensor, average: Tensor, noise: Tensor) -> Tensor:
        return torch.addcmul(scale_gradient, average, noise, value=-1.0)

    def precision_ratio(self, change: Tensor, rate: float) -> Tensor:
        step = change * rate  # 1 + rho c + (rho c)^2 / 2, which is positive for every c
        return (0.5 * step).add_(1.0).mul_(step).add_(1.0)

    @staticmethod
    def jax_update(
        options: Mapping[str, Any], parameters: Sequence[Any], gradients: Sequence[Any],
        state: Mapping[str, Any], rate: Any, temperature: Any, draw: Any,
    ) -> tuple[list[Any], dict[str, Any]]:  # fmt: skip
        """A step in JAX, see ``training.jax_steps.JointUpdate``."""
        import jax.numpy as jnp  # JAX is imported where it is used
        from jax import lax, nn

        (loc, free), (loc_gradient, free_gradient) = parameters, gradients
        (first, second), clip = options["betas"], options["clip"]
        count, peak = state["step"] + 1, jnp.maximum(state["peak"], rate)
        share = jnp.sqrt(rate / jnp.where(peak > 0, peak, 1.0))
        momentum = first * state["momentum"] + (1.0 - first) * loc_gradient
        gradient = momentum / (1.0 - first ** count.astype(loc.dtype))
        scale = nn.softplus(free)
        scale_gradient = free_gradient / -jnp.expm1(-scale)
        if draw is not None:
            before = jnp.maximum(count - 1, 1).astype(loc.dtype)
            average = state["momentum"] / (1.0 - first**before)
            scale_gradient = scale_gradient - average * (draw - loc) / scale
        step = (1.0 - second) * share * scale_gradient * scale / temperature
        scale = scale * lax.rsqrt(1.0 + step * (1.0 + 0.5 * step))
        deviations = jnp.clip(gradient * scale / temperature, -clip, clip)
        moved = [loc - rate * deviations * scale, scale + jnp.log(-jnp.expm1(-scale))]
        return moved, {"step": count, "momentum": momentum, "peak": peak}

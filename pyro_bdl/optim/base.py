"""Natural gradients of a bound in a Gaussian guide, from its gradients in location and scale.

For q(u) = prod_i Normal(u_i; m_i, s_i^2) and the loss L = E_q[E(u)] - eta H(q), with E the energy
-log p(y | w) - eta log p(w) in nats, reparameterized draws give

    dL/dm = E_q[grad E],    dL/ds = s E_q[diag hess E] - eta / s,

At the optimum the precision is S' = E_q[diag hess E] / eta = (dL/ds + eta / s) / (eta s). A
natural-gradient step of size rho moves the precision S = 1/s^2 by the fraction rho toward S' (Khan
& Lin 2017; Khan et al. 2018, section 3). The entropy's term in dL/ds cancels S, so that the
relative change is

    c = (S' - S) / S = s dL/ds / eta,

below -1 where S' is negative.

The gradients are those of one loss, or the sum of those of several micro-batches: ``backward(1 /
k)`` of k steps of the ELBO, ``optimizer.add`` of each, and then ``optimizer.step()``. With the same
draw in all of them this is a step on their rows together; with a draw of its own in each it is a
step of k particles.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.elbo import ELBO
from pyro.infer.util import zero_grads
from torch import Tensor

from pyro_bdl.elbo.checks import CheckedLoss, require_differentiable, step_of
from pyro_bdl.elbo.step import Step, StepOptimizer
from pyro_bdl.guides.mean_field import AutoMeanField
from pyro_bdl.utils.validation import real_number, require


class NaturalStep(NamedTuple):
    """The step size and averages that an optimizer's step moves by.

    :param rate: rho, the step size in the precision.
    :param gradient: the location's average gradient with this step's, (P,).
    :param average: the same before this step, (P,).
    :param temperature: that of the ELBO's last step.
    :param draw: the mean draw (P,) of the ELBO's steps whose gradients have been added up, if all
        are known.
    """

    rate: float
    gradient: Tensor
    average: Tensor
    temperature: float
    draw: Tensor | None


class NaturalGradient(StepOptimizer):
    """Base class: momentum in the location, a moving average in the precision.

    A subclass defines ``parameters_of``, and ``move``. The optimizer's state holds the momentum,
    the number of steps and the largest learning rate so far.
    """

    # The temperatures and draws of the ELBO's steps that enter the next one.
    _added: tuple[tuple[float, Tensor | None], ...] = ()

    def __init__(
        self,
        guide: Any,
        *,
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.99),
        clip: float = 10.0,
    ) -> None:
        for name, value in (("lr", lr), ("clip", clip)):
            real_number(value, name, "(0, inf]")
        for place, beta in enumerate(betas):
            real_number(beta, f"betas[{place}]", "[0, 1)")
        parameters = self.parameters_of(guide)
        self.guide = guide
        super().__init__(parameters, {"lr": lr, "betas": betas, "clip": clip})

    def add(self, step: Step) -> None:
        """Add a step of an ELBO whose gradients enter the next step of the optimizer: the last
        one's temperature, and the mean of the draws.

        ``step(...)`` does so; a loop calls this for each of several micro-batches, or where a
        framework calls ``step`` itself.
        """
        self._added = (*self._added, (step.temperature, step.draw))

    def __getstate__(self) -> dict[str, Any]:
        """The state; a ``deepcopy`` of the optimizer trains the copy of the guide."""
        return {**super().__getstate__(), "guide": self.guide}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse further parameters.

        :raises ValueError: always, since the optimizer trains the guide's parameters alone.
        """
        if self.param_groups:
            raise ValueError(
                f"{type(self).__name__} moves a guide's location and scale and no other "
                "parameters: make a separate optimizer for them, in SVI by "
                "InSVI(..., others=...)"
            )
        super().add_param_group(param_group)

    def parameters_of(self, guide: Any) -> list[Tensor]:
        """The parameters to move, of a guide that is checked."""
        raise NotImplementedError

    def fresh_state(self) -> dict[str, Any]:
        """The state before the first step, which is the location's."""
        loc = self.guide.loc
        return {"step": 0, "momentum": torch.zeros_like(loc, requires_grad=False), "peak": 0.0}

    def move(self, step: NaturalStep, *, lr: float, clip: float) -> None:
        """Move the guide's parameters; where this raises, they stay as they were."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Step | Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step with the gradients from ``step.backward()``, of one loss or several.

        :param closure: the ELBO's step; or a closure, as torch's optimizers take, or nothing, where
            each of the ELBO's steps went through ``add``.
        :raises RuntimeError: if there is no step of an ELBO or no gradient, it is not finite, or
            the precision asked for is not positive; the guide then stays as it was.
        """
        loss = None
        if isinstance(closure, Step):
            self.add(closure)
        elif closure is not None:
            with torch.enable_grad():
                loss = closure()
        added, self._added = self._added, ()
        if not added:
            raise RuntimeError(
                f"{type(self).__name__} needs the ELBO's step, for its temperature and its draw: "
                "take step = elbo(model, guide).take_step(x, y), step.backward(), and then "
                "optimizer.step(step); bdl.elbo.Step(loss) is one of another ELBO"
            )
        draws = [draw for _, draw in added if draw is not None]
        (group,) = self.param_groups
        gradients = [parameter.grad for parameter in group["params"]]
        if any(gradient is None for gradient in gradients):
            raise RuntimeError(
                "the guide's parameters have no gradient: call step.backward() before the step, "
                "and train all of them"
            )
        loc = self.guide.loc
        state = self.state[loc]
        if not state:
            state.update(self.fresh_state())
        number = state["step"] + 1
        if not all(torch.isfinite(gradient).all() for gradient in gradients):
            raise RuntimeError(
                f"the gradient at step {number} is not finite, and the guide stays as it was: "
                "lower lr, or check the data"
            )
        beta1, beta2 = group["betas"]
        peak = max(state["peak"], group["lr"])
        share = math.sqrt(group["lr"] / peak) if peak > 0 else 0.0  # a warm-up may start at zero
        momentum = torch.lerp(state["momentum"], loc.grad, 1 - beta1)
        step = NaturalStep(
            rate=(1 - beta2) * share,
            gradient=momentum / (1 - beta1**number),
            average=state["momentum"] / (1 - beta1 ** max(1, state["step"])),
            temperature=added[-1][0],
            draw=torch.stack(draws).mean(0) if len(draws) == len(added) else None,
        )
        self.move(step, lr=group["lr"], clip=group["clip"])
        state.update(step=number, momentum=momentum, peak=peak)
        return loss


class DiagonalNaturalGradient(NaturalGradient):
    """Natural gradients of a mean-field guide, whose ``scale`` stores the precision 1/s^2.

    A subclass defines ``precision_ratio``, the factor by which the precision grows.
    """

    def parameters_of(self, guide: Any) -> list[Tensor]:
        require(guide, AutoMeanField, "the optimizer moves an AutoMeanField's vectors")
        guide.require_layout()
        free: Any = getattr(guide, "scale_unconstrained", None)
        shared = free is None or free.shape != guide.loc.shape
        if shared or not guide.loc.requires_grad or guide.max_scale is not None:
            raise ValueError(
                "the guide needs a separate location and scale for each weight, both trained: "
                'AutoMeanField(model) with scale="per-weight", without max_scale or '
                "train_loc=False"
            )
        return [guide.loc, free]

    def precision_ratio(self, change: Tensor, rate: float) -> Tensor:
        """The precision after a step divided by the precision before it, (P,).

        :param change: the relative change c that reaches S', (P,).
        :param rate: the step size in the precision.
        """
        raise NotImplementedError

    def control_variate(self, scale_gradient: Tensor, average: Tensor, noise: Tensor) -> Tensor:
        """The gradient in the scales with less noise.

        :param average: the location's average gradient before this step, (P,).
        :param noise: the mean standard Normal noise of the step's draws, (P,).
        """
        return scale_gradient

    def move(self, step: NaturalStep, *, lr: float, clip: float) -> None:
        loc, free = self.param_groups[0]["params"]
        scale = torch.nn.functional.softplus(free)
        scale_gradient = free.grad / torch.expm1(-scale).neg_()  # ds/du = 1 - exp(-s)
        if step.draw is not None:
            noise = (step.draw - loc) / scale
            scale_gradient = self.control_variate(scale_gradient, step.average, noise)
        change = scale_gradient * scale / step.temperature
        scale = scale * self.precision_ratio(change, step.rate).rsqrt()
        # The number of standard deviations that the location would move at lr = 1.
        deviations = (step.gradient * scale).div_(step.temperature)
        loc.addcmul_(deviations.clamp_(-clip, clip), scale, value=-lr)
        free.copy_(scale + torch.expm1(-scale).neg_().log_())  # the inverse of softplus


class InSVI(SVI):
    """``pyro.infer.SVI`` with a torch optimizer: ``InSVI(model, guide, IVON(guide), elbo)``.

    :param optimizer: the torch optimizer.
    :param elbo: a bound of this package, or of Pyro.
    :param others: a Pyro optimizer for all parameters that ``optimizer`` does not hold, such as
        those of the program; without it such parameters are refused.
    """

    def __init__(
        self,
        model: Callable,
        guide: Callable,
        optimizer: torch.optim.Optimizer,
        elbo: ELBO,
        others: pyro.optim.PyroOptim | None = None,
    ) -> None:
        require_differentiable(elbo)
        rest = others or pyro.optim.PyroOptim(torch.optim.SGD, {"lr": 0.0})
        super().__init__(model, guide, rest, elbo)
        self.elbo, self.optimizer, self.others = elbo, optimizer, others

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Take a step; return the loss in nats.

        If it fails, the gradients are set to zero, as after a step, so that they do not enter the
        next one.
        """
        own = {p for group in self.optimizer.param_groups for p in group["params"]}
        rest: set[Tensor] = set()
        try:
            with poutine.trace(param_only=True) as statements, torch.enable_grad():
                step = step_of(self.elbo, self.model, self.guide, args, kwargs)
            if isinstance(self.elbo, CheckedLoss):
                self.elbo.check_step(step, self.model, self.guide, args, kwargs)
            nodes: Any = statements.trace.nodes.values()
            rest = {site["value"].unconstrained() for site in nodes} - own
            step.backward()
            if rest and self.others is None:
                raise ValueError(
                    f"{len(rest)} parameters are not the optimizer's, such as those of the "
                    "program: give InSVI an optimizer for them too (others=pyro.optim.Adam(...))"
                )
            step.move(self.optimizer)
            if rest:
                self.optim(rest)
        finally:
            zero_grads(own | rest)
        return step.value.item()

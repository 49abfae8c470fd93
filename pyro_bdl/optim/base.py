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

The gradients are those of one loss, or the sum of those of several micro-batches: call
``backward`` on each of k losses divided by k, and then ``step``. With the same draw in all of them
this is a step on their rows together; with a draw of its own in each it is a step of k particles.
"""

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pyro
import torch
from pyro.infer.util import zero_grads
from torch import Tensor

from pyro_bdl.guides.mean_field import AutoMeanField


class Move(NamedTuple):
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


class Seen(NamedTuple):
    """The steps of an ELBO whose gradients have been added up.

    :param temperature: that of the last one.
    :param draws: the sum (P,) of their mean draws; None if one is not known.
    """

    steps: int = 0
    temperature: float = 1.0
    draws: Tensor | None = None

    def with_step(self, step: Any) -> "Seen":
        draws = step.draw
        if self.steps and draws is not None:
            draws = None if self.draws is None else self.draws + draws
        return Seen(self.steps + 1, step.temperature, draws)


class NaturalGradient(torch.optim.Optimizer):
    """Base class: momentum in the location, a moving average in the precision.

    A subclass defines ``parameters_of``, and ``move``. The optimizer's state holds the momentum,
    the number of steps and the largest learning rate so far.
    """

    def __init__(
        self,
        guide: Any,
        *,
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.99),
        clip: float = 10.0,
    ) -> None:
        for name, value in (("lr", lr), ("clip", clip)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        for place, beta in enumerate(betas):
            if not 0 <= beta < 1:
                raise ValueError(f"betas[{place}] must lie in [0, 1), got {beta}")
        parameters = self.parameters_of(guide)
        self.guide = guide
        super().__init__(parameters, {"lr": lr, "betas": betas, "clip": clip})
        self._watch()

    def _watch(self) -> None:
        """Add up the draws of the guide's steps as their gradients are added up in its location."""
        self._seen: Seen = Seen()
        this = weakref.ref(self)

        def note(loc: Tensor) -> None:
            optimizer = this()
            if optimizer is not None and optimizer.guide.last_step is not None:
                optimizer._seen = optimizer._seen.with_step(optimizer.guide.last_step)

        hook = self.guide.loc.register_post_accumulate_grad_hook(note)
        weakref.finalize(self, hook.remove).atexit = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._seen = Seen()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "guide" in state:  # a copy
            self._watch()

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

    def move(self, step: Move, *, lr: float, clip: float) -> None:
        """Move the guide's parameters; where this raises, they stay as they were."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step with the gradients from ``loss.backward()``, of one loss or several.

        :raises RuntimeError: if there is no gradient, it is not finite, or the precision asked for
            is not positive; the guide then stays as it was.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # those of another ELBO, such as Pyro's, are not known; no optimizer reads them again
        seen, last = self._seen, self.guide.last_step
        self._seen, self.guide.last_step = Seen(), None
        if not seen.steps and last is not None:  # gradients that were set, not added up
            seen = seen.with_step(last)
        (group,) = self.param_groups
        gradients = [parameter.grad for parameter in group["params"]]
        if any(gradient is None for gradient in gradients):
            raise RuntimeError(
                "the guide's parameters have no gradient: call loss.backward() before the step, "
                "and train all of them"
            )
        loc = self.guide.loc
        state = self.state[loc]
        if not state:
            state.update(step=0, momentum=torch.zeros_like(loc), peak=0.0)
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
        step = Move(
            rate=(1 - beta2) * share,
            gradient=momentum / (1 - beta1**number),
            average=state["momentum"] / (1 - beta1 ** max(1, state["step"])),
            temperature=seen.temperature,
            draw=None if seen.draws is None else seen.draws / seen.steps,
        )
        self.move(step, lr=group["lr"], clip=group["clip"])
        state.update(step=number, momentum=momentum, peak=peak)
        return loss


class DiagonalNaturalGradient(NaturalGradient):
    """Natural gradients of a mean-field guide, whose ``scale`` stores the precision 1/s^2.

    A subclass defines ``growth``, the factor by which the precision grows.
    """

    def parameters_of(self, guide: Any) -> list[Tensor]:
        if not isinstance(guide, AutoMeanField):
            raise TypeError(
                f"the optimizer moves an AutoMeanField's vectors, got {type(guide).__name__}"
            )
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

    def growth(self, change: Tensor, rate: float) -> Tensor:
        """The precision after a step divided by the precision before it, (P,).

        :param change: the relative change c that reaches S', (P,).
        :param rate: the step size in the precision.
        """
        raise NotImplementedError

    def steadied(self, scale_gradient: Tensor, average: Tensor, noise: Tensor) -> Tensor:
        """The gradient in the scales with less noise.

        :param average: the location's average gradient before this step, (P,).
        :param noise: the mean standard Normal noise of the step's draws, (P,).
        """
        return scale_gradient

    def move(self, step: Move, *, lr: float, clip: float) -> None:
        loc, free = self.param_groups[0]["params"]
        scale = torch.nn.functional.softplus(free)
        scale_gradient = free.grad / torch.expm1(-scale).neg_()  # ds/du = 1 - exp(-s)
        if step.draw is not None:
            noise = (step.draw - loc) / scale
            scale_gradient = self.steadied(scale_gradient, step.average, noise)
        change = scale_gradient * scale / step.temperature
        scale = scale * self.growth(change, step.rate).rsqrt()
        # The number of standard deviations that the location would move at lr = 1.
        deviations = (step.gradient * scale).div_(step.temperature)
        loc.addcmul_(deviations.clamp_(-clip, clip), scale, value=-lr)
        free.copy_(scale + torch.expm1(-scale).neg_().log_())  # the inverse of softplus


class InSVI(pyro.optim.PyroOptim):
    """Adapter of a torch optimizer to ``pyro.infer.SVI``, which needs a Pyro optimizer.

    Use it as ``SVI(model, guide, InSVI(IVON(guide)), loss)``.

    :param optimizer: the torch optimizer.
    :param others: a Pyro optimizer for all parameters that ``optimizer`` does not hold, such as
        those of the program; without it such parameters are refused.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, others: pyro.optim.PyroOptim | None = None
    ) -> None:
        super().__init__(torch.optim.SGD, {"lr": 0.0})
        self.optimizer, self.others = optimizer, others

    def __call__(self, params: Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
        """Step all parameters that have a gradient.

        If the step fails, the gradients are set to zero, as SVI does after a step, so that they do
        not enter the next step.
        """
        params = list(params)
        own = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        rest = [p for p in params if id(p) not in own]
        try:
            if rest and self.others is None:
                raise ValueError(
                    f"{len(rest)} parameters are not the optimizer's, such as those of the "
                    "program: give InSVI an optimizer for them too (others=pyro.optim.Adam(...))"
                )
            self.optimizer.step()
            if rest and self.others is not None:
                self.others(rest, *args, **kwargs)
        except (RuntimeError, ValueError):
            zero_grads(params)
            raise

    def get_state(self) -> dict[str, Any]:
        """Return the optimizers' states."""
        state = {"optimizer": self.optimizer.state_dict()}
        return state | ({"others": self.others.get_state()} if self.others is not None else {})

    def set_state(self, state_dict: dict[str, Any]) -> None:
        """Load states from ``get_state``."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        if self.others is not None:
            self.others.set_state(state_dict["others"])

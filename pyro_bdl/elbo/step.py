"""The terms and the step of a bound, as values."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_bdl.tracing.step import Outcome
from pyro_bdl.utils.autograd import add_gradients


class Terms(NamedTuple):
    """The parts of a bound in nats, scalars, averaged over the particles.

    :param log_likelihood: E_q[log p(y | w)].
    :param kl: KL(q || p(w)).
    :param entropy: H(q); zero where the bound has no use for it.
    :param draw: the mean (P,) of the unconstrained draws, detached; None where every datum has
        draws of its own, or the guide is none of this package.
    """

    log_likelihood: Tensor
    kl: Tensor
    entropy: Tensor
    draw: Tensor | None = None


class StepOptimizer(torch.optim.Optimizer):
    """Base class of optimizers whose ``step`` takes the :class:`Step` of a bound."""


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a bound: what optimizers need of it. ``Step(loss)`` is one of another ELBO, such
    as Pyro's.

    :param value: -L(eta) in nats, a scalar.
    :param log_likelihood: E_q[log p(y | w)], detached.
    :param kl: KL(q || p(w)), detached.
    :param temperature: eta, or T in cold mode.
    :param draw: see :class:`Terms`.
    :param outcome: of a graph that has computed the gradients with the value.
    """

    value: Tensor
    log_likelihood: Tensor | None = None
    kl: Tensor | None = None
    temperature: float = 1.0
    draw: Tensor | None = None
    outcome: Outcome | None = None

    @property
    def loss(self) -> Tensor:
        """-L(eta) as a tensor to differentiate; once, where a graph has computed the gradients."""
        return self.value if self.outcome is None else self.outcome.differentiable()

    def move(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer move with the gradients, and with this step if it takes one."""
        given: Any = (self,) if isinstance(optimizer, StepOptimizer) else ()
        optimizer.step(*given)

    def backward(self, factor: float = 1.0) -> None:
        """Add the gradients of ``factor * loss`` to those of the parameters.

        Hooks of the parameters are called. Those of their ``AccumulateGrad`` nodes, which torch
        does not show, are not where a graph has computed the gradients: for these call
        ``step.loss.backward()``.
        """
        if self.outcome is None:
            self.value.backward(None if factor == 1.0 else torch.full_like(self.value, factor))
            return
        gradients = self.outcome.gradients
        if factor != 1.0:
            gradients = tuple(factor * gradient for gradient in gradients)
        add_gradients(self.outcome.leaves, gradients)

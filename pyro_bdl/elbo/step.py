"""The terms and the step of a bound, as values."""

from typing import NamedTuple

from torch import Tensor


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


class Step(NamedTuple):
    """One step of a bound.

    :param loss: -L(eta) in nats, a scalar; differentiable where the step is taken.
    :param log_likelihood: E_q[log p(y | w)], detached.
    :param kl: KL(q || p(w)), detached.
    :param temperature: eta, or T in cold mode.
    :param draw: see :class:`Terms`.
    """

    loss: Tensor
    log_likelihood: Tensor
    kl: Tensor
    temperature: float
    draw: Tensor | None = None

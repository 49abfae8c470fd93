"""The natural gradient of a bound in a diagonal Normal, from its gradient in loc and scale.

For q(u) = prod_i Normal(u_i; m_i, s_i^2) and the loss L = E_q[E(u)] - eta H(q), with E the energy
-log p(y | w) - eta log p(w) in nats, reparameterised draws give

    dL/dm = E_q[grad E],    dL/ds = s E_q[diag hess E] - eta / s,

so that the precision 1/s^2 that L asks for is E_q[diag hess E] / eta = (dL/ds + eta / s) / (eta s).
A step of size rho of the natural gradient moves the precision by the share rho towards it (Khan &
Lin 2017; Khan et al. 2018, section 3).
"""

from torch import Tensor


def precision_wanted(scale_gradient: Tensor, scale: Tensor, temperature: float = 1.0) -> Tensor:
    """(dL/ds + eta / s) / (eta s), an estimate of the best precision; it may be negative."""
    return (scale_gradient + temperature / scale) / (temperature * scale)


def riemannian_step(precision: Tensor, wanted: Tensor, rate: float) -> Tensor:
    """S + rho (S' - S) + rho^2 (S' - S)^2 / (2 S), which is positive for every S' (Lin, Schmidt &
    Khan 2020, equation 5; Shen et al. 2024, algorithm 1)."""
    change = rate * (wanted - precision)
    return precision + change + change.square() / (2 * precision)

"""The natural gradient of a bound in a diagonal Normal, from its gradient in loc and scale.

For q(u) = prod_i Normal(u_i; m_i, s_i^2) and the loss L = E_q[E(u)] - eta H(q), with E the energy
-log p(y | w) - eta log p(w) in nats, reparameterized draws give

    dL/dm = E_q[grad E],    dL/ds = s E_q[diag hess E] - eta / s,

At the optimum the precision is S' = E_q[diag hess E] / eta = (dL/ds + eta / s) / (eta s). A
natural-gradient step of size rho moves the precision S = 1/s^2 by the fraction rho toward S' (Khan
& Lin 2017; Khan et al. 2018, section 3). The entropy's term in dL/ds cancels S, so that the
relative change is

    (S' - S) / S = s dL/ds / eta.
"""

from torch import Tensor


def relative_change(scale_gradient: Tensor, scale: Tensor, temperature: float = 1.0) -> Tensor:
    """An estimate of (S' - S) / S = s dL/ds / eta, (P,); below -1 the precision S' is negative."""
    return scale_gradient * scale / temperature


def riemannian_growth(change: Tensor, rate: float) -> Tensor:
    """The factor 1 + rho c + (rho c)^2 / 2 for a relative change c; it is positive for every c.

    It is [S + rho (S' - S) + rho^2 (S' - S)^2 / (2 S)] / S (Lin, Schmidt & Khan 2020, equation 5;
    Shen et al. 2024, algorithm 1).
    """
    step = change * rate
    return (0.5 * step).add_(1.0).mul_(step).add_(1.0)

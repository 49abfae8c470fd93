"""Effect handlers: programs with a tempered or cold posterior, or without Gaussian local latents;
and contexts that estimate the likelihood with noise for every datum."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from pyro.distributions import Unit
from pyro.poutine.subsample_messenger import _Subsample
from torch import nn

from pyro_bdl.estimators import flipout, local_reparameterization, per_example_dropout
from pyro_bdl.program.one_thread import OneThread
from pyro_bdl.program.trace import is_deterministic, is_prior_factor
from pyro_bdl.utils.validation import check_temperature

if TYPE_CHECKING:
    from pyro_bdl.contrib.gaussian_locals import WithoutLocals

__all__ = [
    "cold",
    "flipout",
    "integrate",
    "local_reparameterization",
    "per_example_dropout",
    "temper",
]


class _ScaleSites(OneThread):
    def __init__(self, factor: float, likelihood_only: bool) -> None:
        super().__init__()
        self.factor, self.likelihood_only = factor, likelihood_only

    def _process_message(self, msg: Any) -> None:
        self.check_thread(msg)
        if msg["type"] != "sample" or isinstance(msg["fn"], _Subsample):
            return
        observed = msg["is_observed"] and not is_deterministic(msg)
        observed = (observed or isinstance(msg["fn"], Unit)) and not is_prior_factor(msg)
        if observed or not self.likelihood_only:
            msg["scale"] = msg["scale"] * self.factor


class Handled(nn.Module):
    """A program under a Pyro handler, with the same parameters and modules."""

    def __init__(self, model: Callable, handler: AbstractContextManager) -> None:
        super().__init__()
        self.model, self.handler = model, handler

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.handler:
            return self.model(*args, **kwargs)


def integrate(model: Callable, *sites: str) -> "WithoutLocals":
    """The program without local latents z_n, integrated in closed form where all is Gaussian.

    For z_n ~ N(m_n, S_n) in a plate and observations y_n ~ N(A_n z_n + b_n, R_n) in it, where all
    but z may depend on the other latents w,

        p(y_n | w) = N(y_n; A_n m_n + b_n, A_n S_n A_n' + R_n),

    as in factor analysis or a linear regression on inputs with noise. Several observations of a row
    follow each other, each given those before. Guides of any kind, Laplace approximations, NUTS,
    SG-MCMC and predictions then treat the program as one without these latents, in minibatches
    too. ``posterior(w, *args)`` of the result gives p(z_n | y_n, w). Deterministic sites are those
    at z_n = m_n. The program runs k + 2 times, for k numbers of a row's latents; that it is linear
    in them is checked in the first run, at one point.

    :param model: a Pyro program; it is not changed.
    :param sites: its local latents to integrate, Normal or MultivariateNormal, all in one plate.
    :raises ValueError: for no sites; in a run, for one that is no latent site.
    :raises UnsupportedProgramError: in a run, where latents or observations are not Gaussian, not
        linear in the local latents, or in other plates.
    """
    if not sites:
        raise ValueError("integrate needs the names of the local latents, as in integrate(m, 'z')")
    from pyro_bdl.contrib.gaussian_locals import WithoutLocals

    return WithoutLocals(model, sites)


def temper(model: Callable, temperature: float) -> nn.Module:
    """The program with the tempered posterior p(y | w)^(1/eta) p(w), for MCMC, ELBOs and curvature.

    ``pyro.factor`` statements are part of the likelihood; those of ``priors.factor`` are not.

    :param model: a Pyro program; it is not changed.
    :param temperature: eta > 0; eta = 1 is Bayes, eta < 1 gives the data more weight.
    :raises ValueError: for a temperature that is not positive and finite.
    """
    return Handled(model, _ScaleSites(1.0 / check_temperature(temperature), True))


def cold(model: Callable, temperature: float) -> nn.Module:
    """The program with the cold posterior (p(y | w) p(w))^(1/T) (Wenzel et al. 2020, eq. 2).

    :param model: a Pyro program; it is not changed.
    :param temperature: T > 0; T = 1 is Bayes, T < 1 is colder.
    :raises ValueError: for a temperature that is not positive and finite.
    """
    return Handled(model, _ScaleSites(1.0 / check_temperature(temperature), False))

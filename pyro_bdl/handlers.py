"""Effect handlers: programs with a tempered or cold posterior, or another prior; and contexts that
estimate the expected log likelihood with separate noise for every datum."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from pyro.distributions import Unit
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import nn

from pyro_bdl.estimators import flipout, local_reparameterization, per_example_dropout
from pyro_bdl.program.gaussian_prior import GaussianPrior, as_gaussian_prior
from pyro_bdl.program.trace import is_deterministic
from pyro_bdl.program.wrappers import Handled, Wrapped
from pyro_bdl.utils.validation import check_temperature

__all__ = [
    "cold",
    "flipout",
    "local_reparameterization",
    "per_example_dropout",
    "temper",
    "with_prior",
]


class _ScaleSites(Messenger):
    def __init__(self, factor: float, likelihood_only: bool) -> None:
        super().__init__()
        self.factor, self.likelihood_only = factor, likelihood_only

    def _process_message(self, msg: Any) -> None:
        if msg["type"] != "sample" or isinstance(msg["fn"], _Subsample):
            return
        observed = msg["is_observed"] and not is_deterministic(msg)
        observed = observed or isinstance(msg["fn"], Unit)
        if observed or not self.likelihood_only:
            msg["scale"] = msg["scale"] * self.factor


class UnderPrior(Wrapped):
    """A program with another prior."""

    def __init__(self, model: Callable, prior: GaussianPrior) -> None:
        super().__init__(model)
        self.prior = prior

    def context(self) -> AbstractContextManager:
        return self.prior.run()


def with_prior(model: Callable, posterior: Any) -> nn.Module:
    """The program with a posterior as its prior, for continual learning (Nguyen et al. 2018).

    The guide's current density q(w) replaces the program's prior. With q(w) = p(w | y_1) the
    posterior given y_2 is p(w | y_1, y_2). Latents that q does not cover keep the program's prior;
    latents that q fixes stay fixed.

    :param model: any Pyro program with the guide's latents; it is not changed.
    :param posterior: a Gaussian guide, or its ``as_prior()``.
    :raises TypeError: for a posterior that is not Gaussian.
    """
    return UnderPrior(model, as_gaussian_prior(posterior))


def temper(model: Callable, temperature: float) -> nn.Module:
    """The program with the tempered posterior p(y | w)^(1/eta) p(w), for MCMC, ELBOs and curvature.

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

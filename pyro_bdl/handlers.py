"""Effect handlers: programs with a tempered or cold posterior, or without Gaussian local latents;
and contexts that estimate the likelihood with noise for every datum."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from pyro.distributions import Unit
from pyro.poutine.util import site_is_subsample
from torch import nn

from pyro_bdl.estimators import flipout, local_reparameterization, per_example_dropout
from pyro_bdl.program.check import require_program
from pyro_bdl.program.trace import is_deterministic, is_prior_factor
from pyro_bdl.utils.names import attributes_elsewhere
from pyro_bdl.utils.one_thread import OneThread
from pyro_bdl.utils.validation import real_number

if TYPE_CHECKING:
    from pyro_bdl.contrib.gaussian_locals import integrate

__all__ = [
    "cold",
    "flipout",
    "integrate",
    "local_reparameterization",
    "per_example_dropout",
    "temper",
]

__getattr__ = attributes_elsewhere(__name__, integrate="pyro_bdl.contrib")


class _ScaleSites(OneThread):
    def __init__(self, factor: float, likelihood_only: bool) -> None:
        super().__init__()
        self.factor, self.likelihood_only = factor, likelihood_only

    def _process_message(self, msg: Any) -> None:
        self.check_thread(msg)
        if msg["type"] != "sample" or site_is_subsample(msg):
            return
        observed = msg["is_observed"] and not is_deterministic(msg)
        observed = (observed or isinstance(msg["fn"], Unit)) and not is_prior_factor(msg)
        if observed or not self.likelihood_only:
            msg["scale"] = msg["scale"] * self.factor


class WithHandler(nn.Module):
    """A program under a Pyro handler, with the same parameters and modules."""

    def __init__(self, model: Callable, handler: AbstractContextManager) -> None:
        super().__init__()
        require_program(model)
        self.model, self.handler = model, handler

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.handler:
            return self.model(*args, **kwargs)


def temper(model: Callable, temperature: float) -> nn.Module:
    """The program with the tempered posterior p(y | w)^(1/eta) p(w), for MCMC, ELBOs and curvature.

    ``pyro.factor`` statements are part of the likelihood; those of ``priors.factor`` are not.

    :param model: a Pyro program; it is not changed.
    :param temperature: eta > 0; eta = 1 is Bayes, eta < 1 gives the data more weight.
    :raises ValueError: for a temperature that is not positive and finite.
    """
    return WithHandler(model, _ScaleSites(1.0 / real_number(temperature, "temperature"), True))


def cold(model: Callable, temperature: float) -> nn.Module:
    """The program with the cold posterior (p(y | w) p(w))^(1/T) (Wenzel et al. 2020, eq. 2).

    :param model: a Pyro program; it is not changed.
    :param temperature: T > 0; T = 1 is Bayes, T < 1 is colder.
    :raises ValueError: for a temperature that is not positive and finite.
    """
    return WithHandler(model, _ScaleSites(1.0 / real_number(temperature, "temperature"), False))

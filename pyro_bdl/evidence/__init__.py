"""The evidence of a Laplace approximation, and hyperparameters that maximise it."""

from pyro_bdl.evidence.linearised import linearised_log_likelihood, linearised_optimum
from pyro_bdl.evidence.marginal import effective_parameters, log_marginal_likelihood
from pyro_bdl.evidence.maximize import Evidence, maximize

__all__ = [
    "Evidence",
    "effective_parameters",
    "linearised_log_likelihood",
    "linearised_optimum",
    "log_marginal_likelihood",
    "maximize",
]

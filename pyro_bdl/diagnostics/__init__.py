"""Convergence, importance sampling and cross-validation on draws of shape (chains, draws, ...).

Every function computes in float64 on the device of the draws, or on the CPU where that device has
no float64, for all quantities behind the first two axes at once, in blocks that limit the memory.
"""

from pyro_bdl.diagnostics.convergence import bfmi, convergence
from pyro_bdl.diagnostics.ess import ess, within_ess
from pyro_bdl.diagnostics.loo import loo, loo_approximate_posterior
from pyro_bdl.diagnostics.mcse import mcse
from pyro_bdl.diagnostics.psis import psis
from pyro_bdl.diagnostics.rhat import rhat, within_rhat
from pyro_bdl.diagnostics.sensitivity import prior_sensitivity
from pyro_bdl.diagnostics.stacking import Stacking, stacking_weights
from pyro_bdl.diagnostics.summary import explain_chains, function_draws, summary

__all__ = [
    "Stacking",
    "bfmi",
    "convergence",
    "ess",
    "explain_chains",
    "function_draws",
    "loo",
    "loo_approximate_posterior",
    "mcse",
    "prior_sensitivity",
    "psis",
    "rhat",
    "stacking_weights",
    "summary",
    "within_ess",
    "within_rhat",
]

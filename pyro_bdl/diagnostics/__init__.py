"""Convergence, importance sampling and cross-validation on draws of shape (chains, draws, ...).

Every function computes in float64 on the device of the draws, for all quantities behind the first
two axes at once, in blocks that limit the memory.
"""

from pyro_bdl.diagnostics.convergence import Convergence, convergence
from pyro_bdl.diagnostics.energy import bfmi
from pyro_bdl.diagnostics.ess import ess, within_ess
from pyro_bdl.diagnostics.loo import LOO, loo, loo_approximate_posterior
from pyro_bdl.diagnostics.mcse import mcse
from pyro_bdl.diagnostics.psis import PSIS, good_k, psis
from pyro_bdl.diagnostics.rhat import rhat, within_rhat
from pyro_bdl.diagnostics.subsampled_loo import SubsampledLOO, difference_estimate, subsampled_loo
from pyro_bdl.diagnostics.summary import Summary, explain_chains, function_draws, summary

__all__ = [
    "LOO",
    "PSIS",
    "Convergence",
    "SubsampledLOO",
    "Summary",
    "bfmi",
    "convergence",
    "difference_estimate",
    "ess",
    "explain_chains",
    "function_draws",
    "good_k",
    "loo",
    "loo_approximate_posterior",
    "mcse",
    "psis",
    "rhat",
    "subsampled_loo",
    "summary",
    "within_ess",
    "within_rhat",
]

"""Bayesian deep learning as a plugin on Pyro."""

from importlib import import_module
from typing import TYPE_CHECKING

from pyro_bdl import (
    acquisition,
    bayesian_linear,
    calibration,
    diagnostics,
    distributed,
    elbo,
    evidence,
    guides,
    handlers,
    importance,
    init,
    mcmc,
    metrics,
    models,
    nn,
    optim,
    priors,
    selectors,
    temperature,
    training,
)
from pyro_bdl.arviz_export import to_arviz
from pyro_bdl.citing import cite
from pyro_bdl.comparison.compare import compare
from pyro_bdl.comparison.costs import Costs
from pyro_bdl.comparison.evaluate import Evaluation, evaluate
from pyro_bdl.comparison.leave_one_out import KFold, k_fold
from pyro_bdl.comparison.loo import loo, loo_mixture
from pyro_bdl.comparison.observe import PredictiveDraws
from pyro_bdl.comparison.summarize import Summary, summarize
from pyro_bdl.comparison.table import Comparison, compare_evaluations
from pyro_bdl.freezing import freeze
from pyro_bdl.guides.saved import load_posterior
from pyro_bdl.nn import BayesianModule, bayesianize
from pyro_bdl.predictive.linearized import LinearizedPredictive
from pyro_bdl.predictive.sampled import Predictive, prior_predictive
from pyro_bdl.program.program import Program
from pyro_bdl.program.samples import Samples
from pyro_bdl.training import Checkpoint
from pyro_bdl.utils.memory import working_memory
from pyro_bdl.utils.names import attributes_elsewhere
from pyro_bdl.version import __version__

import_module("pyro_bdl.contrib")  # so that files of its guides and its backend are known

if TYPE_CHECKING:
    from pyro_bdl import data, plots, references, sklearn

# Modules that import matplotlib, pandas, scikit-learn or data sets: imported at their first use.
_LATER = ("data", "plots", "references", "sklearn")

__all__ = [
    "BayesianModule",
    "Checkpoint",
    "Comparison",
    "Costs",
    "Evaluation",
    "KFold",
    "LinearizedPredictive",
    "Predictive",
    "PredictiveDraws",
    "Program",
    "Samples",
    "Summary",
    "__version__",
    "acquisition",
    "bayesian_linear",
    "bayesianize",
    "calibration",
    "cite",
    "compare",
    "compare_evaluations",
    "data",
    "diagnostics",
    "distributed",
    "elbo",
    "evaluate",
    "evidence",
    "freeze",
    "guides",
    "handlers",
    "importance",
    "init",
    "k_fold",
    "load_posterior",
    "loo",
    "loo_mixture",
    "mcmc",
    "metrics",
    "models",
    "nn",
    "optim",
    "plots",
    "prior_predictive",
    "priors",
    "references",
    "selectors",
    "sklearn",
    "summarize",
    "temperature",
    "to_arviz",
    "training",
    "working_memory",
]


def __dir__() -> list[str]:
    return list(__all__)


__getattr__ = attributes_elsewhere(__name__, **{name: f"{__name__}.{name}" for name in _LATER})

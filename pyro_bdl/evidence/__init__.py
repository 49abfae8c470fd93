"""The evidence of a Laplace approximation, and its maximization in hyperparameters."""

from pyro_bdl.evidence.alternating_training import train_by_evidence
from pyro_bdl.evidence.expectation_maximization import ExpectationMaximization, em
from pyro_bdl.evidence.last_layer import LastLayerEvidence
from pyro_bdl.evidence.linearized import linearized_optimum
from pyro_bdl.evidence.marginal import effective_parameters, log_marginal_likelihood
from pyro_bdl.evidence.maximize import Evidence, hyperparameters, maximize
from pyro_bdl.evidence.online import MarginalLikelihoodTraining
from pyro_bdl.evidence.variational_em import variational_em

__all__ = [
    "Evidence",
    "ExpectationMaximization",
    "LastLayerEvidence",
    "MarginalLikelihoodTraining",
    "effective_parameters",
    "em",
    "hyperparameters",
    "linearized_optimum",
    "log_marginal_likelihood",
    "maximize",
    "train_by_evidence",
    "variational_em",
]

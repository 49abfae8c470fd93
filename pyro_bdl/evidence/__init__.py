"""The evidence of a Laplace approximation, and its maximization in hyperparameters."""

from typing import TYPE_CHECKING

from pyro_bdl.evidence.formula import log_marginal_likelihood
from pyro_bdl.evidence.last_layer import LastLayerEvidence
from pyro_bdl.evidence.maximize import maximize
from pyro_bdl.evidence.train import train_by_evidence
from pyro_bdl.evidence.variational_em import variational_em
from pyro_bdl.utils.names import attributes_elsewhere

if TYPE_CHECKING:
    from pyro_bdl.contrib.expectation_maximization import em

__all__ = [
    "LastLayerEvidence",
    "em",
    "log_marginal_likelihood",
    "maximize",
    "train_by_evidence",
    "variational_em",
]

__getattr__ = attributes_elsewhere(__name__, em="pyro_bdl.contrib")

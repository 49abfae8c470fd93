"""Training a guide by stochastic variational inference."""

from pyro_bdl.training.checkpoint import Checkpoint, Minibatches
from pyro_bdl.training.svi import Training, collect_swag, estimate_elbo, train

__all__ = ["Checkpoint", "Minibatches", "Training", "collect_swag", "estimate_elbo", "train"]

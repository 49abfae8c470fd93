"""Training a guide by stochastic variational inference."""

from pyro_bdl.training.svi import Training, collect_swag, estimate_elbo, train

__all__ = ["Training", "collect_swag", "estimate_elbo", "train"]

"""Training a guide by stochastic variational inference."""

from pyro_bdl.training.checkpoint import Checkpoint
from pyro_bdl.training.collapse import collapse
from pyro_bdl.training.descent import Minibatches
from pyro_bdl.training.held_out import HeldOut
from pyro_bdl.training.independent import fit_each
from pyro_bdl.training.svi import estimate_elbo, train
from pyro_bdl.training.swag import collect_swag

__all__ = [
    "Checkpoint",
    "HeldOut",
    "Minibatches",
    "collapse",
    "collect_swag",
    "estimate_elbo",
    "fit_each",
    "train",
]

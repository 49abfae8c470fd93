"""Training a guide by stochastic variational inference."""

from pyro_bdl.training.checkpoint import Checkpoint
from pyro_bdl.training.collapse import Collapse, collapse
from pyro_bdl.training.descent import Minibatches, Training
from pyro_bdl.training.held_out import HeldOut
from pyro_bdl.training.svi import estimate_elbo, train
from pyro_bdl.training.swag import collect_swag

__all__ = [
    "Checkpoint",
    "Collapse",
    "HeldOut",
    "Minibatches",
    "Training",
    "collapse",
    "collect_swag",
    "estimate_elbo",
    "train",
]

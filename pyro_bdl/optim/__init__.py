"""Optimizers that take the natural gradient of a Gaussian guide, in the place of Adam."""

from pyro_bdl.optim.base import InSVI
from pyro_bdl.optim.ivon import IVON
from pyro_bdl.optim.noisy_kfac import KroneckerGaussNewton_ELBO, NoisyKFAC
from pyro_bdl.optim.vogn import VOGN, GaussNewton_ELBO

__all__ = ["IVON", "VOGN", "GaussNewton_ELBO", "InSVI", "KroneckerGaussNewton_ELBO", "NoisyKFAC"]

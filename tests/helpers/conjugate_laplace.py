"""Laplace guides at the mode of the linear Gaussian model."""

import torch

from pyro_bdl.guides import AutoLaplaceGGN

D = torch.float64


def at_mode(conjugate, model=None, eta=1.0, **options):
    """The guide at the exact maximum of the conjugate model."""
    guide = AutoLaplaceGGN(model or conjugate.model, **options)
    guide.prototype(conjugate.x, conjugate.y)
    with torch.no_grad():
        guide.loc.copy_(conjugate.mean(eta))
    return guide


def data(conjugate):
    return conjugate.x, conjugate.y

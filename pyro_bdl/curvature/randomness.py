"""Randomness of a program in evaluation mode."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.distributions.take_apart import base_distribution, parameters_of_any
from pyro_bdl.errors import BdlWarning
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import leave_open, record
from pyro_bdl.utils.module_state import evaluation_mode


def warn_of_randomness(
    model: Callable, subset: Subset, vector: Tensor, args: tuple, kwargs: Mapping[str, Any]
) -> None:
    """Warn if two runs of a program in evaluation mode at the same latents give different
    distributions.

    Dropout that is always on has this effect.
    """
    values = subset.layout.constrain(vector)[0]
    with torch.no_grad(), evaluation_mode(model):
        first = record(model, values, args, kwargs, draw=leave_open)
        again = record(model, {**values, **first.subsamples}, args, kwargs, draw=leave_open)
    for name in first.observed:
        before, after = (
            parameters_of_any(base_distribution(run.observed[name].distribution))
            for run in (first, again)
        )
        for key, value in before.items():
            if not torch.allclose(value, after[key].to(value), rtol=1e-3, equal_nan=True):
                warnings.warn(
                    f"the {key} of site '{name}' is random: it differs between two runs of the "
                    "program in evaluation mode with the same latents, and the approximation is "
                    "that of one draw; for dropout write F.dropout(x, p, self.training) or "
                    "nn.Dropout, or take AutoMCDropout",
                    BdlWarning,
                    stacklevel=5,
                )
                return

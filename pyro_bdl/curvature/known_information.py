"""The curvature of likelihoods without a known Fisher information: the dense Hessian."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.structures import Full
from pyro_bdl.errors import BdlWarning
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import leave_open, record
from pyro_bdl.utils.module_state import evaluation_mode


def with_known_information(
    model: Callable,
    subset: Subset,
    vector: Tensor,
    data: tuple[tuple, Mapping[str, Any]],
    config: CurvatureConfig,
) -> CurvatureConfig:
    """Return the configuration, or that of the dense Hessian if no Fisher information is known.

    It is not known if discrete sites are summed out of a likelihood so that it is no mixture for
    each datum.

    :param data: arguments of one run.
    """
    if config.curvature == "hessian":
        return config
    values = subset.layout.constrain(vector)[0]
    with torch.no_grad(), evaluation_mode(model):
        run = record(model, values, *data, draw=leave_open)
    name = run.coupled_data()
    if name is None:
        return config
    warnings.warn(
        f"the data of site '{name}' depend on each other through discrete sites that are summed "
        "out, so that their likelihood is no product of known ones: the curvature is its dense "
        'Hessian; structure="full" with curvature="hessian" asks for that',
        BdlWarning,
        stacklevel=5,
    )
    return replace(config, structure=Full(), curvature="hessian")

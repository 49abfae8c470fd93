"""The number of parameters that the data determine, of Laplace approximations."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from pyro_bdl.guides import LaplaceGuide
from pyro_bdl.utils.tables import Column

_NEARLY_ALL, _NEARLY_NONE = 0.9, 0.05

COLUMNS = (
    Column(
        "gamma",
        "gamma",
        help="Effective number of parameters: how many the data determine, the others being left "
        "to the prior (MacKay 1992).",
    ),
    Column("latents", "of", help="How many parameters there are: the most that gamma can be."),
)
FURTHER_COLUMNS = (Column("fitted", "data", help="How many data gamma is about."),)


def determined(posterior: Any) -> dict[str, Any]:
    """gamma of P parameters and N data by the keys of the columns; nothing for other posteriors."""
    if not isinstance(posterior, LaplaceGuide):
        return {}
    with torch.no_grad():
        gamma = float(posterior.effective_parameters())
    return {"gamma": gamma, "latents": posterior.subset.size, "fitted": posterior.num_data}


def reading(row: Mapping[str, Any]) -> str:
    """A sentence on gamma if it is high or low, else empty.

    A gamma near P means that all parameters are in use, so that more units may be worth a try; if
    a larger network has the same gamma, the smaller one was enough. A small gamma is one that is
    small beside both P and the number of data, which it cannot exceed by much.
    """
    gamma, latents = row.get("gamma"), row.get("latents")
    if gamma is None or latents is None or not math.isfinite(gamma):
        return ""
    share = f"{gamma:.3g} of {latents} parameters"
    if gamma >= _NEARLY_ALL * latents:
        return f"the data determine {share}, nearly all: the network may be too small"
    if gamma <= _NEARLY_NONE * min(latents, row.get("fitted") or latents):
        return f"the data determine {share}, nearly none: the prior decides"
    return ""

"""Shapes of the sites of a program."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from pyro.poutine.subsample_messenger import _Subsample

from pyro_bdl.program.program import trace_once
from pyro_bdl.program.trace import is_deterministic


class SiteShape(NamedTuple):
    """The value of a site in one run.

    :param shape: its shape.
    :param is_latent: the site is neither observed nor deterministic.
    """

    shape: torch.Size
    is_latent: bool


def site_shapes(model: Callable, args: tuple, kwargs: dict) -> dict[str, SiteShape]:
    """The shapes of a program's sites in one run; the indices of plates are no sites."""
    return {
        name: SiteShape(node["value"].shape, not node["is_observed"] and not is_deterministic(node))
        for name, node in trace_once(model, args, kwargs).nodes.items()
        if node["type"] == "sample" and not isinstance(node["fn"], _Subsample)
    }

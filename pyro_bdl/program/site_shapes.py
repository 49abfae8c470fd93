"""Shapes of the sites of a program, and those that Pyro's predictive gives them."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from pyro.poutine.subsample_messenger import _Subsample

from pyro_bdl.program.program import trace_once
from pyro_bdl.program.trace import is_deterministic


class SiteShape(NamedTuple):
    """The value of a site in one run.

    :param shape: its shape.
    :param batch_dims: how many of its dimensions are those of plates.
    :param is_latent: the site is neither observed nor deterministic.
    """

    shape: torch.Size
    batch_dims: int
    is_latent: bool


class SiteShapes(NamedTuple):
    """All sample sites of a program in their order.

    :param sites: by name; the indices of plates are no sites.
    :param nesting: how many plates lie within each other at most, by their dimensions.
    """

    sites: Mapping[str, SiteShape]
    nesting: int

    def padded(self, name: str, count: int) -> torch.Size:
        """The shape of ``count`` draws of a site in ``pyro.infer.Predictive``: dimensions of size
        one stand for the plates that the site is not in."""
        site = self.sites[name]
        return torch.Size([count, *(1,) * (self.nesting - site.batch_dims), *site.shape])


def site_shapes(model: Callable, args: tuple, kwargs: dict) -> SiteShapes:
    """The shapes of a program's sites in one run."""
    found, nesting = {}, 0
    for name, node in trace_once(model, args, kwargs).nodes.items():
        if node["type"] != "sample":
            continue
        dims = [frame.dim for frame in node["cond_indep_stack"] if frame.vectorized]
        nesting = max(nesting, -min(dims, default=0))
        if isinstance(node["fn"], _Subsample):
            continue
        is_latent = not node["is_observed"] and not is_deterministic(node)
        found[name] = SiteShape(node["value"].shape, len(node["fn"].batch_shape), is_latent)
    return SiteShapes(found, nesting)

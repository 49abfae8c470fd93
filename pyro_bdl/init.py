"""Starting points for guides: a network starts as a network, not as zeros."""

import functools
from typing import Any

import torch
from pyro.infer.autoguide.initialization import init_to_mean, init_to_median
from torch import Tensor

from pyro_bdl.layout import transform_of

INIT_KEY = "pyro_bdl_init"


def init_to_network(site: Any = None) -> Any:
    """The network's own value; for weights of a hand-written program fan-in noise.

    A site of ``bayesianize`` starts at the value that the network has. Any other site over the
    reals with two or more dimensions starts at draws around the prior's mean, of variance
    1 / fan_in and never wider than the prior, since the mean itself makes all hidden units alike.
    The rest starts at the prior's median.
    """
    if site is None:
        return functools.partial(init_to_network)
    value = site["infer"].get(INIT_KEY)
    if value is not None:
        return value.detach().clone()
    fn = site["fn"]
    if len(fn.event_shape) < 2 or not _is_real(fn.support):
        return init_to_median(site, num_samples=15)
    start = init_to_mean(site)
    fan_in = fn.event_shape[1:].numel()
    return start + torch.randn_like(start) * _prior_sd(fn, start).clamp(max=fan_in**-0.5)


def _prior_sd(fn: Any, start: Tensor) -> Tensor:
    try:
        return fn.stddev.nan_to_num(nan=float("inf")).expand_as(start)
    except NotImplementedError:
        return torch.full_like(start, float("inf"))


def _is_real(support: Any) -> bool:
    return transform_of(support) is None

"""Starting points for guides: a network starts as a network, not as zeros."""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from pyro.infer.autoguide.initialization import InitMessenger, init_to_mean, init_to_median
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_bdl.distributions.copies import is_improper
from pyro_bdl.program.layout import transform_of
from pyro_bdl.program.network_sites import INIT_KEY, OWNER_KEY
from pyro_bdl.program.supports import feasible_value


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
    improper = is_improper(fn)
    if len(fn.event_shape) < 2 or not _is_real(fn.support):
        return feasible_value(fn) if improper else init_to_median(site, num_samples=15)
    start = feasible_value(fn) if improper else init_to_mean(site)
    fan_in = torch.Size(fn.event_shape[1:]).numel()
    return start + torch.randn_like(start) * _prior_sd(fn, start).clamp(max=fan_in**-0.5)


def start_at(init_loc_fn: Callable) -> Messenger:
    """A handler that starts a program's latents by an initialization of Pyro's kind; those of
    improper priors, which it may not know how to start, at a feasible value."""

    def start(site: Any) -> Any:
        if site["fn"].support.is_discrete:
            return site["fn"].sample()  # it is summed out: any value does
        try:
            return init_loc_fn(site)
        except NotImplementedError:
            if not is_improper(site["fn"]):
                raise
            return feasible_value(site["fn"])

    return InitMessenger(start)


def init_afresh(site: Any = None) -> Any:
    """Other values of a network's weights, drawn as its layers draw theirs.

    Weights of modules with a ``reset_parameters`` are drawn by it, for each network of a plate
    anew; whatever else starts as by ``init_to_network``.
    """
    if site is None:
        return functools.partial(init_afresh)
    owner = site["infer"].get(OWNER_KEY)
    if owner is not None:
        module, attribute = owner
        reset = "reset_parameters" if hasattr(module, "reset_parameters") else "_reset_parameters"
        if hasattr(module, reset):
            batch = site["fn"].batch_shape  # of a plate of networks, each with its own values
            values = []
            for _ in range(batch.numel()):
                fresh = copy.deepcopy(module)
                getattr(fresh, reset)()
                values.append(getattr(fresh, attribute).detach())
            return torch.stack(values).reshape(batch + values[0].shape)
    return init_to_network(site)


def relative_scale(delta: float = 0.1, floor: float = 1e-3) -> Callable[[Tensor], Tensor]:
    """The scales s = delta max(|m|, floor) as a function of m, for a guide's ``init_scale``:
    weights that a pretrained network has made large are moved more (Krishnan et al. 2020, MOPED).

    :param delta: s in units of |m|.
    :param floor: the smallest |m| that counts, so that zeros (such as biases) get a scale too.
    :raises ValueError: for a number that is not positive and finite.
    """
    for name, value in (("delta", delta), ("floor", floor)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
    return functools.partial(_relative_scale, delta, floor)


def _relative_scale(delta: float, floor: float, loc: Tensor) -> Tensor:
    return delta * loc.detach().abs().clamp(min=floor)


def _prior_sd(fn: Any, start: Tensor) -> Tensor:
    try:
        return fn.stddev.nan_to_num(nan=float("inf")).expand_as(start)
    except NotImplementedError:
        return torch.full_like(start, float("inf"))


def _is_real(support: Any) -> bool:
    return transform_of(support) is None

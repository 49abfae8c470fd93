"""Starting points for guides: a network starts at its own initialization, not at zeros."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from pyro.infer.autoguide.initialization import InitMessenger, init_to_mean, init_to_median
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_bdl.distributions.copies import is_improper
from pyro_bdl.program.layout import transform_of_latent
from pyro_bdl.program.network_sites import INIT_KEY, OWNER_KEY
from pyro_bdl.program.supports import feasible_value
from pyro_bdl.utils.validation import real_number

__all__ = [
    "init_afresh",
    "init_to_network",
    "relative_scale",
]


def init_to_network(site: Any = None) -> Any:
    """Start at the network's own value, or at fan-in noise for weights of a hand-written program.

    A site of ``bayesianize`` starts at the network's value. Any other real site with two or more
    dimensions starts at a draw around the prior's mean with variance 1 / fan_in, or the prior's
    variance if that is smaller, because at the mean all hidden units would be equal. Other sites
    start at the prior's median.
    """
    if site is None:
        return functools.partial(init_to_network)
    value = site["infer"].get(INIT_KEY)
    if value is not None:
        return value.detach().clone()
    fn = site["fn"]
    improper = is_improper(fn)
    if len(fn.event_shape) < 2 or transform_of_latent(site["name"], fn) is not None:
        return feasible_value(fn) if improper else init_to_median(site, num_samples=15)
    start = feasible_value(fn) if improper else init_to_mean(site)
    fan_in = torch.Size(fn.event_shape[1:]).numel()
    return start + torch.randn_like(start) * _prior_sd(fn, start).clamp(max=fan_in**-0.5)


def start_at(init_loc_fn: Callable) -> Messenger:
    """A handler that starts a program's latents by one of Pyro's initialization functions.

    Latents with an improper prior start at a feasible value if the function cannot start them.
    """

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
    """Start at new random weights, drawn by the network's own initialization.

    Weights of modules with a ``reset_parameters`` are drawn by it, for each network of a plate
    anew; whatever else starts as by ``init_to_network``.
    """
    if site is None:
        return functools.partial(init_afresh)
    owner = site["infer"].get(OWNER_KEY)
    if owner is None or reset_of(owner[0]) is None:
        return init_to_network(site)
    batch = site["fn"].batch_shape  # of a plate of networks, each with its own values
    values = [_redrawn(*owner) for _ in range(batch.numel())]
    return torch.stack(values).reshape(batch + values[0].shape)


def reset_of(module: nn.Module) -> str | None:
    """The name of a module's method that draws its parameters anew; None where it has none."""
    names = ("reset_parameters", "_reset_parameters")
    return next((name for name in names if hasattr(module, name)), None)


def _redrawn(module: nn.Module, attribute: str) -> Tensor:
    """A parameter as the module draws it anew."""
    fresh = copy.deepcopy(module)
    if attribute in fresh._buffers:  # where bayesianize has it, and ``parameters()`` does not
        value = getattr(fresh, attribute)
        delattr(fresh, attribute)
        fresh.register_parameter(attribute, nn.Parameter(value))
    getattr(fresh, str(reset_of(fresh)))()
    return getattr(fresh, attribute).detach()


def relative_scale(delta: float = 0.1, floor: float = 1e-3) -> Callable[[Tensor], Tensor]:
    """The scales s = delta max(|m|, floor) as a function of m, for a guide's ``init_scale``.

    Large weights of a pretrained network get larger scales (Krishnan et al. 2020, MOPED).

    :param delta: s in units of |m|.
    :param floor: a lower bound of |m|, so that zeros (such as biases) get a scale too.
    :raises ValueError: for a number that is not positive and finite.
    """
    delta, floor = real_number(delta, "delta"), real_number(floor, "floor")
    return functools.partial(_relative_scale, delta, floor)


def _relative_scale(delta: float, floor: float, loc: Tensor) -> Tensor:
    return delta * loc.detach().abs().clamp(min=floor)


def _prior_sd(fn: Any, start: Tensor) -> Tensor:
    try:
        return fn.stddev.nan_to_num(nan=float("inf")).expand_as(start)
    except NotImplementedError:
        return torch.full_like(start, float("inf"))

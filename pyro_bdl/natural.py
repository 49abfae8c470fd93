"""The parameters of observation distributions on an unbounded scale, where models are linear."""

from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor
from torch.distributions import Distribution, Independent, transform_to
from torch.distributions.transforms import identity_transform
from torch.distributions.utils import probs_to_logits

from pyro_bdl.observation import parameters_of, take_apart, without_wrappers
from pyro_bdl.program import Run, Site

SEVERAL_CLASSES = ("Categorical", "OneHotCategorical")


def natural_parameters(distribution: Distribution, run: Run | None = None) -> dict[str, Tensor]:
    """A distribution's tensors by constructor argument, unbounded: scales and rates as their
    logarithms, probabilities as logits.

    :param run: the run that the distribution is from. Where it recorded the network's own output
        behind normalised logits, that output is taken: approximations of class probabilities use
        its variances.
    """
    base: Any = without_wrappers(distribution)[0]
    kind, result = type(base).__name__, {}
    for key, value in parameters_of(base).items():
        if key == "probs":
            key, value = "logits", probs_to_logits(value, is_binary=kind == "Bernoulli")
        if kind in SEVERAL_CLASSES and run is not None:
            value = _as_given(value, run)
        result[key] = natural_value(kind, key, value)
    return result


def constrained_value(kind: str, key: str, natural: Tensor) -> Tensor:
    """One constructor argument from its unbounded value."""
    return _bijection(kind, key)(natural)


def natural_value(kind: str, key: str, value: Tensor) -> Tensor:
    """One constructor argument on its unbounded scale."""
    return _bijection(kind, key).inv(value)


def with_natural(site: Site, natural: dict[str, Tensor]) -> Site:
    """The site with other unbounded parameters, which may have more leading dimensions."""
    kind = known_kind(site)
    arguments = {key: constrained_value(kind, key, value) for key, value in natural.items()}
    base = getattr(dist, kind)(**arguments, validate_args=False)
    return site._replace(distribution=_wrapped_like(site.distribution, base))


def known_kind(site: Site) -> str:
    """The name of the site's distribution without wrappers.

    :raises NotImplementedError: where it is not made of tensors that can be moved.
    """
    kind = type(without_wrappers(site.distribution)[0]).__name__
    if take_apart(site.distribution) is None:
        raise NotImplementedError(
            f"the linearised model does not know {kind} observations: use Predictive"
        )
    return kind


def _wrapped_like(outer: Distribution, base: Any) -> Any:
    """``base`` with the masks and event dimensions of another distribution."""
    if isinstance(outer, Independent):
        inner = _wrapped_like(outer.base_dist, base)
        return inner.to_event(outer.reinterpreted_batch_ndims)
    if isinstance(outer, MaskedDistribution):
        inner = _wrapped_like(outer.base_dist, base)
        return inner if outer._mask is None else inner.mask(outer._mask)
    return base


def _bijection(kind: str, key: str) -> Any:
    if key == "logits" or (kind, key) == ("Binomial", "total_count"):
        return identity_transform
    return transform_to(getattr(dist, kind).arg_constraints[key])


def _as_given(logits: Tensor, run: Run) -> Tensor:
    for value in run.deterministic.values():
        if not isinstance(value, Tensor) or value.shape != logits.shape:
            continue
        ours, theirs = (torch.log_softmax(v.detach(), -1) for v in (value, logits))
        if torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5):
            return value
    return logits

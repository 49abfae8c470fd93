"""The parameters of observation distributions on an unbounded scale, for linearized models."""

from collections.abc import Iterable
from typing import Any

import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Distribution,
    Independent,
    constraints,
    transform_to,
)
from torch.distributions.transforms import identity_transform
from torch.distributions.utils import probs_to_logits

from pyro_bdl.distributions.take_apart import (
    Structure,
    base_distribution,
    parameters_of,
    part_with,
    rebuild,
    take_apart,
)
from pyro_bdl.program.trace import Run, Site

SEVERAL_CLASSES = ("Categorical", "OneHotCategorical")
_BINARY = ("Bernoulli", "Geometric", "ContinuousBernoulli", "Binomial", "NegativeBinomial")


def unconstrained_parameters(distribution: Distribution, output: Any = None) -> dict[str, Tensor]:
    """A distribution's tensors by constructor argument on an unbounded scale.

    Scales and rates become logarithms, probabilities become logits.

    :param output: the recorded output of the network (``recorded_output``). It is returned in place
        of the logits that were normalized from it, since approximations of class probabilities use
        its variances.
    """
    base: Any = base_distribution(distribution)
    kind, result = type(base).__name__, {}
    for key, value in parameters_of(base).items():
        part, name = part_with(base, key)
        if name in ("probs", "gate"):
            binary = name == "gate" or type(part).__name__ in _BINARY
            key = key.removesuffix(name) + ("gate_logits" if name == "gate" else "logits")
            value = probs_to_logits(value, is_binary=binary)
        if kind in SEVERAL_CLASSES and output is not None and _is_normalized(output, value):
            value = output
        result[key] = unconstrained_value(base, key, value)
    return result


def constrained_value(base: Distribution, key: str, values: Tensor) -> Tensor:
    """Convert an unbounded value to an argument of a distribution without wrappers."""
    return _bijection(base, key)(values)


def unconstrained_value(base: Distribution, key: str, value: Tensor) -> Tensor:
    """Convert an argument of a distribution without wrappers to its unbounded scale.

    :raises NotImplementedError: for an affine transform with a negative scale.
    """
    if key.startswith("transforms.") and key.endswith(".scale") and not bool((value > 0).all()):
        raise NotImplementedError(
            "the linearized model does not know affine transforms with a scale that is not "
            "positive: use Predictive"
        )
    return _bijection(base, key).inv(value)


def with_unconstrained(site: Site, values: dict[str, Tensor]) -> Site:
    """The site with other unbounded parameters, which may have more leading dimensions."""
    base = base_distribution(site.distribution)
    structure, _ = _split(site)
    arguments = {key: constrained_value(base, key, value) for key, value in values.items()}
    again = rebuild(structure._replace(event_dims=0), arguments)
    return site._replace(distribution=_wrapped_like(site.distribution, again))


def known_kind(site: Site) -> str:
    """The name of the site's distribution without wrappers.

    :raises NotImplementedError: if the distribution cannot be split into tensors.
    """
    _split(site)
    return type(base_distribution(site.distribution)).__name__


def are_known(sites: Iterable[Site]) -> bool:
    """Return whether every site's distribution can be split into tensors."""
    return all(take_apart(site.distribution) is not None for site in sites)


def _split(site: Site) -> tuple[Structure, dict[str, Tensor]]:
    apart = take_apart(site.distribution)
    if apart is None:
        kind = type(base_distribution(site.distribution)).__name__
        raise NotImplementedError(
            f"the linearized model does not know {kind} observations: use Predictive"
        )
    return apart


def _wrapped_like(outer: Distribution, base: Any) -> Any:
    """``base`` with the masks and event dimensions of another distribution."""
    if isinstance(outer, Independent):
        inner = _wrapped_like(outer.base_dist, base)
        return inner.to_event(outer.reinterpreted_batch_ndims)
    if isinstance(outer, MaskedDistribution):
        inner = _wrapped_like(outer.base_dist, base)
        return inner if outer._mask is None else inner.mask(outer._mask)
    return base


def _bijection(base: Distribution, key: str) -> Any:
    part, name = part_with(base, key)
    if name in ("logits", "gate_logits"):
        return identity_transform
    if isinstance(part, AffineTransform):
        return transform_to(constraints.positive if name == "scale" else constraints.real)
    constraint = part.arg_constraints[name]
    return identity_transform if constraint.is_discrete else transform_to(constraint)


def recorded_output(run: Run, name: str) -> Any:
    """The network's output for an observed site, the deterministic site "f" beside it; or None.

    It is "head.f" for an observed site "head.y", as the ready-made programs name them.
    """
    head, dot, _ = name.rpartition(".")
    return run.deterministic.get(f"{head}{dot}f")


def _is_normalized(output: Any, logits: Tensor) -> bool:
    """Return whether the logits are the output but for a number for each datum."""
    if not isinstance(output, Tensor) or output.shape != logits.shape:
        return False
    ours, theirs = (torch.log_softmax(value.detach(), -1) for value in (output, logits))
    return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)

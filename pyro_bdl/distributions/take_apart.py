"""Distributions split into a structure and tensors, and rebuilt: only tensors may leave
``vmap``."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Distribution,
    Independent,
    MixtureSameFamily,
)
from torch.distributions import transforms as T

# Classes that are made of the tensors that ``arg_constraints`` names, each with the batch shape
# followed by its event dimensions. Of probabilities and logits the constructor takes one.
_KNOWN = {
    "Normal", "LogNormal", "Laplace", "Cauchy", "Gumbel", "Logistic", "SoftLaplace",
    "AsymmetricLaplace", "SoftAsymmetricLaplace", "StudentT", "VonMises", "Gamma",
    "InverseGamma", "Beta", "Kumaraswamy", "Dirichlet", "Exponential", "HalfNormal",
    "HalfCauchy", "Weibull", "Pareto", "Poisson", "GammaPoisson", "Bernoulli", "Categorical",
    "OneHotCategorical", "Geometric", "ContinuousBernoulli", "Multinomial", "NegativeBinomial",
    "Binomial", "BetaBinomial", "DirichletMultinomial", "OrderedLogistic", "MultivariateNormal",
    "LowRankMultivariateNormal", "MultivariateStudentT", "MixtureSameFamily",
    "TransformedDistribution", "ZeroInflatedDistribution",
}  # fmt: skip
_CHOSEN = {
    "MultivariateNormal": ("loc", "scale_tril"),
    "MixtureSameFamily": (),
    "TransformedDistribution": (),
}
# Arguments that are distributions; below, arguments that are not tensors.
_PARTS = {
    "MixtureSameFamily": ("mixture_distribution", "component_distribution"),
    "TransformedDistribution": ("base_dist",),
    "ZeroInflatedDistribution": ("base_dist",),
}
_CONSTANTS = {"Multinomial": ("total_count",), "DirichletMultinomial": ("is_sparse",)}
_EITHER = ("probs", "logits")
_WITHOUT_TENSORS = (T.ExpTransform, T.SigmoidTransform, T.TanhTransform, T.SoftplusTransform)
_DRAWS_FOR_MOMENTS = 256


class Structure(NamedTuple):
    """A distribution without its tensors.

    :param kind: the name of its class in ``pyro.distributions``.
    :param event_dims: the batch dimensions that ``to_event`` makes event dimensions.
    :param parts: its component distributions, by argument.
    :param constants: other arguments, by name.
    """

    kind: str
    event_dims: int
    parts: dict[str, "Structure"]
    constants: dict[str, Any]


def without_wrappers(distribution: Distribution) -> tuple[Distribution, int]:
    """The distribution inside ``to_event`` and ``mask``, and the number of dims that ``to_event``
    took."""
    event_dims = 0
    while isinstance(distribution, Independent | MaskedDistribution):
        event_dims += getattr(distribution, "reinterpreted_batch_ndims", 0)
        distribution = distribution.base_dist
    return distribution, event_dims


def base_distribution(distribution: Distribution, *, through_masks: bool = True) -> Any:
    """The distribution inside ``to_event`` and ``mask``.

    :param through_masks: whether to look inside ``mask`` too.
    """
    wrappers = (Independent, MaskedDistribution) if through_masks else (Independent,)
    while isinstance(distribution, wrappers):
        distribution = distribution.base_dist
    return distribution


def parameters_of(base: Distribution) -> dict[str, Tensor]:
    """The tensor arguments of a distribution without wrappers, by name, broadcast to its batch
    shape.

    Of probabilities and logits only the one that was given is returned. Arguments of a component of
    a mixture or of a transformed distribution have dotted names, as in
    "component_distribution.loc".
    """
    if _structure(base) is not None:
        return dict(_tensors(base))
    held = [name for name in base.arg_constraints if isinstance(vars(base).get(name), Tensor)]
    if not held:  # the distribution is made by a transform of another one
        held = [name for name in base.arg_constraints if hasattr(base, name)]
        held = [name for name in held if name != "logits" or "probs" not in held]
    values = {name: getattr(base, name) for name in held}
    return {
        name: broadcast_parameter(base, name, value)
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def broadcast_parameter(base: Any, name: str, value: Tensor) -> Tensor:
    """An argument of a distribution, expanded to the whole batch shape if its shape allows it."""
    constraint = base.arg_constraints.get(name)
    try:
        event_dims = 0 if constraint is None else constraint.event_dim
    except NotImplementedError:  # the constraint of a support's bound, which is a number
        event_dims = 0
    shape = base.batch_shape + value.shape[max(0, value.dim() - event_dims) :]
    if value.shape == shape or value.dim() > len(shape):
        return value
    fits = all(a in (1, b) for a, b in zip(value.shape[::-1], shape[::-1], strict=False))
    return value.expand(shape) if fits else value


def part_with(base: Any, key: str) -> tuple[Any, str]:
    """The component of ``base`` that owns a tensor of ``parameters_of``, and the tensor's name
    there.

    :param key: the tensor's dotted name, such as "component_distribution.loc".
    """
    *path, name = key.split(".")
    for step in path:
        base = base[int(step)] if step.isdigit() else getattr(base, step)
        base = base_distribution(base) if isinstance(base, Distribution) else base
    return base, name


def take_apart(distribution: Distribution) -> tuple[Structure, dict[str, Tensor]] | None:
    """A distribution's structure and its tensors; None for an unknown distribution."""
    structure = _structure(distribution)
    if structure is None:
        return None
    return structure, dict(_tensors(base_distribution(distribution)))


def rebuild(structure: Structure, tensors: dict[str, Tensor]) -> dist.TorchDistribution:
    """Rebuild a distribution from the results of ``take_apart``; tensors may have new leading
    dimensions."""
    own = {name: value for name, value in tensors.items() if "." not in name}
    arguments: dict[str, Any] = {**structure.constants, **own}
    for name, part in structure.parts.items():
        arguments[name] = rebuild(part, _below(name, tensors))
    if structure.kind == "TransformedDistribution":
        moved = _below("transforms", tensors)
        steps = [_moved(t, _below(str(i), moved)) for i, t in enumerate(arguments["transforms"])]
        base: Any = dist.TransformedDistribution(arguments["base_dist"], steps, validate_args=False)
    else:
        base = getattr(dist, structure.kind)(**arguments, validate_args=False)
    return base.to_event(structure.event_dims)


def observation_kind(distribution: Distribution) -> str:
    """The name of a distribution without wrappers; of a mixture over classes, or over both values
    of a Bernoulli, that of its components."""
    base: Any = base_distribution(distribution)
    if isinstance(base, MixtureSameFamily):
        inner = observation_kind(base.component_distribution)
        if inner == "Bernoulli" or _class_probabilities(base) is not None:
            return inner
    return type(base).__name__


def observation_mean(distribution: Distribution) -> Tensor:
    """E[y]; for a Categorical the class probabilities, with one more dimension.

    Without a closed form it is the mean of 256 draws.
    """
    base: Any = base_distribution(distribution)
    probabilities = _class_probabilities(base)
    if probabilities is not None:
        return probabilities
    return base.mean if has_moments(base) else _drawn_moments(base)[0]


def observation_variance(distribution: Distribution) -> Tensor:
    """Var[y]; for a Categorical the variance q (1 - q) of each class's indicator.

    Without a closed form it is the variance of 256 draws.
    """
    base: Any = base_distribution(distribution)
    probabilities = _class_probabilities(base)
    if probabilities is not None:
        return probabilities * (1.0 - probabilities)
    return base.variance if has_moments(base) else _drawn_moments(base)[1]


def observation_covariance(distribution: Distribution) -> tuple[Tensor, Tensor]:
    """E[y] and Cov[y] of the E numbers of each event, (*batch, E) and (*batch, E, E).

    The dimensions that ``to_event`` takes belong to the batch: they are independent. E is 1 for a
    single number, and the number of classes for a Categorical, whose moments are those of the
    classes' indicators. Without a closed form both are moments of 256 draws.
    """
    base: Any = base_distribution(distribution)
    classes = _class_probabilities(base)
    classes = base.probs if type(base).__name__ == "OneHotCategorical" else classes
    if classes is not None:
        return classes, classes.diag_embed() - _outer(classes)
    if not base.event_shape:
        return observation_mean(base)[..., None], observation_variance(base)[..., None, None]
    if type(base).__name__ == "Multinomial":
        return base.mean, base.mean.diag_embed() - _outer(base.mean) / base.total_count
    if has_moments(base) and hasattr(base, "covariance_matrix"):  # a Student-t's is its scatter
        matrix = base.covariance_matrix
        ratio = (base.variance / matrix.diagonal(dim1=-2, dim2=-1)).sqrt()
        return base.mean, matrix * _outer(ratio)
    draws = base.sample(torch.Size([_DRAWS_FOR_MOMENTS])).flatten(1 + len(base.batch_shape))
    mean = draws.mean(0)
    return mean, _outer(draws - mean).mean(0)


def _outer(vectors: Tensor) -> Tensor:
    return vectors[..., :, None] * vectors[..., None, :]


def has_moments(distribution: Distribution) -> bool:
    """Return whether mean and variance have closed forms."""
    base: Any = base_distribution(distribution)
    try:
        return _class_probabilities(base) is not None or (base.mean, base.variance) is not None
    except NotImplementedError:
        return False


# --------------------------------------------------------------------------------- components


def _kind(base: Distribution) -> str:
    name = "MixtureSameFamily" if isinstance(base, MixtureSameFamily) else type(base).__name__
    return "ZeroInflatedDistribution" if name.startswith("ZeroInflated") else name


def _argument_names(base: Distribution) -> tuple[str, ...] | None:
    """The names of the tensors that a distribution is made of; None for an unknown class."""
    kind = _kind(base)
    if kind not in _KNOWN:
        return None
    if kind == "ZeroInflatedDistribution":
        return ("gate_logits",) if "gate_logits" in vars(base) else ("gate",)
    if kind in _CHOSEN:
        return _CHOSEN[kind]
    # the one that was given came first; the other one is derived from it
    given = next((name for name in vars(base) if name in _EITHER), "probs")
    return tuple(n for n in base.arg_constraints if n not in _EITHER or n == given)


def _structure(distribution: Distribution) -> Structure | None:
    base: Any
    base, event_dims = without_wrappers(distribution)
    kind = _kind(base)
    if _argument_names(base) is None or not hasattr(dist, kind):
        return None
    constants = {name: getattr(base, name) for name in _CONSTANTS.get(kind, ())}
    if kind == "TransformedDistribution":
        if not all(map(_is_known, base.transforms)):
            return None
        if base.event_shape and any(dict(_tensors_of_transform(t)) for t in base.transforms):
            return None
        constants["transforms"] = list(base.transforms)
    parts = {}
    for name in _PARTS.get(kind, ()):
        inner = getattr(base, name)
        part = None if _is_masked(inner) else _structure(inner)
        if part is None:
            return None
        parts[name] = part
    return Structure(kind, event_dims, parts, constants)


def _tensors(base: Any) -> Iterator[tuple[str, Tensor]]:
    for name in _argument_names(base) or ():
        value = getattr(base, name)
        yield name, broadcast_parameter(base, name, value)
    for part in _PARTS.get(_kind(base), ()):
        for name, value in _tensors(base_distribution(_expanded(base, part))):
            yield f"{part}.{name}", value
    if _kind(base) == "TransformedDistribution":
        for number, transform in enumerate(base.transforms):
            for name, value in _tensors_of_transform(transform):
                yield f"transforms.{number}.{name}", value.expand(base.batch_shape)


def _expanded(base: Any, part: str) -> Any:
    """A component of a distribution, expanded to all batch dimensions: a mixture's may have
    fewer."""
    inner = getattr(base, part)
    if not isinstance(base, MixtureSameFamily):
        return inner
    own = () if part == "mixture_distribution" else inner.batch_shape[-1:]
    shape = base.batch_shape + own
    return inner if inner.batch_shape == shape else inner.expand(shape)


def _tensors_of_transform(transform: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(transform, AffineTransform):
        for name in ("loc", "scale"):
            value = getattr(transform, name)
            if isinstance(value, Tensor):
                yield name, value


def _is_known(transform: Any) -> bool:
    return isinstance(transform, _WITHOUT_TENSORS) or type(transform) is AffineTransform


def _moved(transform: Any, tensors: dict[str, Tensor]) -> Any:
    if not tensors:
        return transform
    arguments = {"loc": transform.loc, "scale": transform.scale, **tensors}
    return AffineTransform(**arguments, event_dim=transform.event_dim)


def _below(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    start = name + "."
    return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}


def _is_masked(distribution: Any) -> bool:
    return isinstance(base_distribution(distribution, through_masks=False), MaskedDistribution)


def _class_probabilities(base: Any) -> Tensor | None:
    """The probability of each class in the last dimension, also of a mixture over classes."""
    if type(base).__name__ in ("Categorical", "OrderedLogistic"):
        return base.probs
    if not isinstance(base, MixtureSameFamily):
        return None
    inner = _class_probabilities(base_distribution(base.component_distribution))
    if inner is None:
        return None
    weights = base.mixture_distribution.probs
    spread = weights.reshape(weights.shape + (1,) * (inner.dim() - weights.dim()))
    return (spread * inner).sum(weights.dim() - 1)


def _drawn_moments(base: Distribution) -> tuple[Tensor, Tensor]:
    draws = base.sample(torch.Size([_DRAWS_FOR_MOMENTS]))
    mean = draws.mean(0)
    return mean, (draws - mean).square().mean(0)

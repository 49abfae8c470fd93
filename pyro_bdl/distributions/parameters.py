"""Distributions as tensors by name: read off, changed and put back; on an unbounded scale."""

import inspect
from collections.abc import Iterator
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import MaskedDistribution, TorchDistributionMixin
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Distribution,
    Independent,
    constraints,
    transform_to,
)
from torch.distributions import transforms as T
from torch.distributions.utils import probs_to_logits

from pyro_bdl.distributions.families import family_of, name_of
from pyro_bdl.utils.autograd import leaves_behind

SEVERAL_CLASSES = ("Categorical", "OneHotCategorical")
_LOGITS = {"probs": "logits", "gate": "gate_logits"}
_WITHOUT_TENSORS = (T.ExpTransform, T.SigmoidTransform, T.TanhTransform, T.SoftplusTransform)


def base_distribution(distribution: Distribution, *, through_masks: bool = True) -> Any:
    """The distribution inside ``to_event`` and ``mask``.

    :param through_masks: whether to look inside ``mask`` too.
    """
    wrappers = (Independent, MaskedDistribution) if through_masks else (Independent,)
    while isinstance(distribution, wrappers):
        distribution = distribution.base_dist
    return distribution


def parameters_of(distribution: Distribution) -> dict[str, Tensor]:
    """The tensor arguments of a distribution without wrappers, broadcast to its batch shape.

    Of probabilities and logits only the one that was given is returned, of a multivariate Normal's
    scales ``scale_tril``. Arguments of a component have dotted names, as in
    "component_distribution.loc" of a mixture, "base_dist.loc" and "transforms.0.scale" of a
    transformed distribution.
    """
    return {name: value for name, value, _ in _walk(base_distribution(distribution))}


def is_known(distribution: Distribution) -> bool:
    """Return whether ``rebuilt`` makes a distribution again from its parameters alone."""
    base: Any = base_distribution(distribution)
    family, name = family_of(base), name_of(base)
    if name == "TransformedDistribution":
        affine = [t for t in base.transforms if type(t) is AffineTransform]
        others = [t for t in base.transforms if not isinstance(t, _WITHOUT_TENSORS)]
        if len(others) > len(affine) or (base.event_shape and any(map(_tensors_of_affine, affine))):
            return False
    if family.parts:
        parts = [getattr(base, part) for part in family.parts]
        return all(is_known(part) and not has_masks(part) for part in parts)
    bounds = base.arg_constraints
    if not bounds or any(map(constraints.is_dependent, bounds.values())):
        return False
    arguments = inspect.signature(_class_of(base).__init__).parameters.keys()
    return arguments <= bounds.keys() | family.constants.keys() | {"self", "validate_args"}


def has_masks(distribution: Distribution) -> bool:
    """Return whether there is a mask around a distribution."""
    return isinstance(base_distribution(distribution, through_masks=False), MaskedDistribution)


def constants_of(base: Distribution) -> dict[str, Any]:
    """The arguments of a distribution without wrappers that are no tensors."""
    constants = family_of(base).constants.items()
    return {name: getattr(base, attribute) for name, attribute in constants}


def rebuilt(template: Any, tensors: dict[str, Tensor], *, masks: bool = False) -> Any:
    """A distribution like another one, of other tensors, which may have new leading dimensions.

    :param template: gives classes, event dimensions and constants; its tensors are not read.
    :param tensors: as ``parameters_of`` returns them.
    :param masks: keep the template's masks, which are left out by default.
    """
    if isinstance(template, Independent):
        base = rebuilt(template.base_dist, tensors, masks=masks)
        return base.to_event(template.reinterpreted_batch_ndims)
    if isinstance(template, MaskedDistribution):
        base = rebuilt(template.base_dist, tensors, masks=masks)
        return base.mask(template._mask) if masks and template._mask is not None else base
    kind, arguments = _class_of(template), constants_of(template)
    arguments |= {name: value for name, value in tensors.items() if "." not in name}
    for part in family_of(template).parts:
        arguments[part] = rebuilt(getattr(template, part), _below(part, tensors))
    if kind is dist.TransformedDistribution:
        moved = _below("transforms", tensors)
        steps = [_moved(t, _below(str(i), moved)) for i, t in enumerate(template.transforms)]
        return kind(arguments["base_dist"], steps, validate_args=False)
    return kind(**arguments, validate_args=False)


def _class_of(base: Distribution) -> Any:
    """The class that makes a distribution of a family: its own, or Pyro's where it is torch's."""
    name, kind = name_of(base), type(base)
    is_own = kind.__name__ == name and issubclass(kind, TorchDistributionMixin)
    return kind if is_own else getattr(dist, name, kind)


def _walk(base: Any) -> Iterator[tuple[str, Tensor, constraints.Constraint]]:
    """The tensors of a distribution without wrappers: names, values, and their constraints."""
    for name in _argument_names(base):
        value = getattr(base, name, None)
        if isinstance(value, Tensor):
            constraint = base.arg_constraints[name]
            yield name, _broadcast(value, base.batch_shape, constraint), constraint
    for part in family_of(base).parts:
        for name, value, constraint in _walk(base_distribution(_whole_part(base, part))):
            yield f"{part}.{name}", value, constraint
    if name_of(base) == "TransformedDistribution" and not base.event_shape:
        for number, transform in enumerate(base.transforms):
            for name, value in _tensors_of_affine(transform).items():
                constraint = constraints.positive if name == "scale" else constraints.real
                yield f"transforms.{number}.{name}", value.expand(base.batch_shape), constraint


def _argument_names(base: Any) -> list[str]:
    """The arguments that are tensors, one of those that exclude each other."""
    is_inflated = isinstance(base, dist.ZeroInflatedDistribution)  # the others are its part's
    names = (dist.ZeroInflatedDistribution if is_inflated else base).arg_constraints
    left_out = {"covariance_matrix", "precision_matrix"} if "scale_tril" in names else set()
    for pair in _LOGITS.items():
        # the one that was given came first; the other one is derived from it
        given = next((name for name in vars(base) if name in pair), pair[0])
        left_out |= {*pair} - {given}
    return [name for name in names if name not in left_out]


def _broadcast(
    value: Tensor, batch_shape: torch.Size, constraint: constraints.Constraint
) -> Tensor:
    """An argument, expanded to the whole batch shape if its shape allows it."""
    event_dims = 0 if constraints.is_dependent(constraint) else constraint.event_dim
    shape = batch_shape + value.shape[max(0, value.dim() - event_dims) :]
    if value.shape == shape or value.dim() > len(shape):
        return value
    fits = all(a in (1, b) for a, b in zip(value.shape[::-1], shape[::-1], strict=False))
    return value.expand(shape) if fits else value


def _whole_part(base: Any, part: str) -> Any:
    """A component, expanded to all batch dimensions: a mixture's may have fewer."""
    inner = getattr(base, part)
    if name_of(base) != "MixtureSameFamily":
        return inner
    own = () if part == "mixture_distribution" else inner.batch_shape[-1:]
    shape = base.batch_shape + own
    return inner if inner.batch_shape == shape else inner.expand(shape)


def _tensors_of_affine(transform: Any) -> dict[str, Tensor]:
    if not isinstance(transform, AffineTransform):
        return {}
    values = {"loc": transform.loc, "scale": transform.scale}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _moved(transform: Any, tensors: dict[str, Tensor]) -> Any:
    if not tensors:
        return transform
    arguments = {"loc": transform.loc, "scale": transform.scale, **tensors}
    return AffineTransform(**arguments, event_dim=transform.event_dim)


def _below(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    start = name + "."
    return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}


# ----------------------------------------------------------------------- on an unbounded scale


def bijections(distribution: Distribution) -> dict[str, T.Transform]:
    """For each unconstrained parameter the map to an argument of the constructor."""
    maps: dict[str, T.Transform] = {}
    for key, _, constraint in _walk(base_distribution(distribution)):
        start, name = _split(key)
        if name in _LOGITS or constraint.is_discrete:
            maps[start + _LOGITS.get(name, name)] = T.identity_transform
        else:
            maps[key] = transform_to(constraint)
    return maps


def unconstrained_parameters(distribution: Distribution, output: Any = None) -> dict[str, Tensor]:
    """A distribution's tensors by constructor argument on an unbounded scale.

    Scales and rates become logarithms, probabilities become logits.

    :param output: the recorded output of the network. It is returned in place of the logits that
        were normalized from it, since approximations of class probabilities use its variances.
    :raises NotImplementedError: for an affine transform with a scale that is not positive.
    """
    base, result, maps = base_distribution(distribution), {}, bijections(distribution)
    for key, value, constraint in _walk(base):
        start, name = _split(key)
        if start.startswith("transforms.") and name == "scale" and not bool((value > 0).all()):
            raise NotImplementedError(
                "the linearized model does not know affine transforms with a scale that is not "
                "positive: use Predictive"
            )
        if name in _LOGITS:
            key = start + _LOGITS[name]
            value = probs_to_logits(value, is_binary=constraint.event_dim == 0)
        if name_of(base) in SEVERAL_CLASSES and _is_normalized(output, value):
            value = output
        result[key] = maps[key].inv(value)
    return result


def with_unconstrained(distribution: Distribution, values: dict[str, Tensor]) -> Any:
    """The distribution, wrappers included, with other unconstrained parameters, which may have more
    leading dimensions."""
    maps = bijections(distribution)
    return rebuilt(distribution, {k: maps[k](v) for k, v in values.items()}, masks=True)


def _split(key: str) -> tuple[str, str]:
    start, dot, name = key.rpartition(".")
    return start + dot, name


def _is_normalized(output: Any, logits: Tensor) -> bool:
    """Return whether the logits are the output but for a number for each datum, and depend on
    nothing that takes a gradient besides the output: a term that is zero here may not stay so."""
    if not isinstance(output, Tensor) or output.shape != logits.shape:
        return False
    behind = {id(leaf) for leaf in leaves_behind(output)}
    if any(id(leaf) not in behind for leaf in leaves_behind(logits)):
        return False
    ours, theirs = (torch.log_softmax(value.detach(), -1) for value in (output, logits))
    return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)

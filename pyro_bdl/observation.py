"""Observation distributions taken apart into tensors, so that they may leave ``vmap``."""

from typing import Any, NamedTuple

import pyro.distributions as dist
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor
from torch.distributions import Distribution, Independent

# The constructor's arguments, all of the batch shape (with event dimensions of their own).
_ARGUMENTS = {
    "Normal": ("loc", "scale"),
    "LogNormal": ("loc", "scale"),
    "Laplace": ("loc", "scale"),
    "Cauchy": ("loc", "scale"),
    "Gumbel": ("loc", "scale"),
    "StudentT": ("df", "loc", "scale"),
    "Gamma": ("concentration", "rate"),
    "Beta": ("concentration1", "concentration0"),
    "Exponential": ("rate",),
    "HalfNormal": ("scale",),
    "Poisson": ("rate",),
    "NegativeBinomial": ("total_count", "logits"),
    "Binomial": ("total_count", "logits"),
    "MultivariateNormal": ("loc", "scale_tril"),
}
_PROBS_OR_LOGITS = ("Bernoulli", "Categorical", "OneHotCategorical")


class Structure(NamedTuple):
    """What is left of a distribution without its tensors."""

    kind: str
    event_dims: int


def without_wrappers(distribution: Distribution) -> tuple[Distribution, int]:
    """The distribution inside ``to_event`` and ``mask``, and how many dims the former claims."""
    event_dims = 0
    while isinstance(distribution, Independent | MaskedDistribution):
        event_dims += getattr(distribution, "reinterpreted_batch_ndims", 0)
        distribution = distribution.base_dist
    return distribution, event_dims


def parameters_of(base: Distribution) -> dict[str, Tensor]:
    """The tensors that a distribution without wrappers is made of, by argument.

    They are those that it was given, broadcast; of probabilities and logits the one given.
    """
    names = _argument_names(base)
    if names:
        values = {name: getattr(base, name) for name in names}
    else:
        values = {name: vars(base).get(name) for name in base.arg_constraints}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _argument_names(base: Distribution) -> tuple[str, ...]:
    kind = type(base).__name__
    if kind in _PROBS_OR_LOGITS:
        # Categorical keeps what it was given in _param; the other of the two is derived
        return ("logits",) if "logits" in vars(base) else ("probs",)
    return _ARGUMENTS.get(kind, ())


def take_apart(distribution: Distribution) -> tuple[Structure, dict[str, Tensor]] | None:
    """A distribution's structure and its tensors; None for a kind that is not known."""
    base, event_dims = without_wrappers(distribution)
    kind = type(base).__name__
    names = _argument_names(base)
    if not names or not hasattr(dist, kind):
        return None
    return Structure(kind, event_dims), {name: getattr(base, name) for name in names}


def rebuild(structure: Structure, tensors: dict[str, Tensor]) -> dist.TorchDistribution:
    """The distribution again, with whatever leading dimensions the tensors have gained."""
    base = getattr(dist, structure.kind)(**tensors, validate_args=False)
    return base.to_event(structure.event_dims)


def observation_mean(distribution: Distribution) -> Tensor:
    """E[y]; for a Categorical the probabilities of the classes, in one more dimension."""
    base: Any = without_wrappers(distribution)[0]
    return base.probs if type(base).__name__ == "Categorical" else base.mean


def observation_variance(distribution: Distribution) -> Tensor:
    """Var[y]; for a Categorical that of each class's indicator, q (1 - q)."""
    base: Any = without_wrappers(distribution)[0]
    if type(base).__name__ == "Categorical":
        return base.probs * (1.0 - base.probs)
    return base.variance

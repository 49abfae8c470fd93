"""The parameters of observation distributions on an unbounded scale, where models are linear."""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Distribution, biject_to

from pyro_bdl.observation import parameters_of, without_wrappers
from pyro_bdl.program import Run

_KEPT = ("logits", "total_count")


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
            tiny = torch.finfo(value.dtype).tiny
            binary = kind == "Bernoulli"
            result["logits"] = torch.logit(value) if binary else value.clamp(min=tiny).log()
        elif key == "logits" and kind != "Bernoulli" and run is not None:
            result[key] = _as_given(value, run)
        else:
            result[key] = natural_value(kind, key, value)
    return result


def constrained_parameters(kind: str, natural: dict[str, Tensor]) -> dict[str, Tensor]:
    """Constructor arguments from unbounded ones."""
    return {
        key: value if key in _KEPT else _bijection(kind, key)(value)
        for key, value in natural.items()
    }


def natural_value(kind: str, key: str, value: Tensor) -> Tensor:
    """One constructor argument on its unbounded scale."""
    return value if key in _KEPT else _bijection(kind, key).inv(value)


def _bijection(kind: str, key: str) -> Any:
    return biject_to(getattr(dist, kind).arg_constraints[key])


def _as_given(logits: Tensor, run: Run) -> Tensor:
    for value in run.deterministic.values():
        if not isinstance(value, Tensor) or value.shape != logits.shape:
            continue
        normalised = torch.log_softmax(value.detach(), -1)
        if torch.allclose(normalised, logits.detach(), rtol=1e-4, atol=1e-5):
            return value
    return logits

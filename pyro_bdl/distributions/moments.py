"""Moments of observations; those of classes are moments of their indicators."""

from collections.abc import Callable
from typing import Any

import torch
from pyro.distributions import MultivariateStudentT
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    MixtureSameFamily,
    Multinomial,
    OneHotCategorical,
)
from torch.nn.functional import logsigmoid

from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.utils.precision import double

_DRAWS = 256


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
    """E[y]; for a Categorical the class probabilities, with one more dimension."""
    return observation_moments(distribution)[0]


def observation_moments(distribution: Distribution) -> tuple[Tensor, Tensor]:
    """E[y] and Var[y]; for a Categorical the class probabilities q and q (1 - q), with one more
    dimension.

    Without closed forms both are moments of 256 draws.
    """
    base: Any = base_distribution(distribution)
    classes = _class_probabilities(base)
    if classes is not None:
        return classes, classes * (1.0 - classes)
    closed = next((rule for kind, rule in _CLOSED.items() if isinstance(base, kind)), None)
    try:
        return (base.mean, base.variance) if closed is None else closed(base)
    except NotImplementedError:
        draws = base.sample(torch.Size([_DRAWS]))
        return draws.mean(0), draws.var(0, correction=0)


def _student_t(base: Any) -> tuple[Tensor, Tensor]:
    """torch's and Pyro's own select entries by a mask and write into them, which no graph and no
    ``vmap`` can follow; so that of an F distribution."""
    if hasattr(base, "scale_tril"):
        df, squares = base.df[..., None], base.scale_tril.square().sum(-1)
    else:
        df, squares = base.df, base.scale.square()
    df, loc, squares = torch.broadcast_tensors(df, base.loc, squares)
    finite = squares * df / (df - 2.0).clamp(min=torch.finfo(df.dtype).tiny)
    heavy = torch.where(df > 1.0, torch.inf, torch.nan)
    return torch.where(df > 1.0, loc, torch.nan), torch.where(df > 2.0, finite, heavy)


def _fisher_snedecor(base: Any) -> tuple[Tensor, Tensor]:
    a, b = torch.broadcast_tensors(base.df1, base.df2)
    mean = b / (b - 2.0)
    variance = 2.0 * mean.square() * (a + b - 2.0) / (a * (b - 4.0))
    return torch.where(b > 2.0, mean, torch.nan), torch.where(b > 4.0, variance, torch.nan)


_CLOSED: dict[type, Callable[[Any], tuple[Tensor, Tensor]]] = {
    torch.distributions.StudentT: _student_t,
    MultivariateStudentT: _student_t,
    torch.distributions.FisherSnedecor: _fisher_snedecor,
}


def log_probabilities(distribution: Distribution) -> Tensor | None:
    """The log probability of each class in the last dimension, in nats, from the logits where there
    are any: they do not underflow as probabilities do. None for mixtures, and for other numbers."""
    base: Any = base_distribution(distribution)
    if isinstance(base, Bernoulli):
        if "logits" in vars(base):
            return logsigmoid(torch.stack([-base.logits, base.logits], -1))
        return torch.stack([(-double(base.probs)).log1p(), double(base.probs).log()], -1)
    if not isinstance(base, Categorical | OneHotCategorical):
        return None
    return base.logits if "logits" in vars(base) else double(base.probs).log()


def observation_covariance(distribution: Distribution) -> tuple[Tensor, Tensor]:
    """E[y] and Cov[y] of the E numbers of each event, (*batch, E) and (*batch, E, E).

    The dimensions that ``to_event`` takes belong to the batch: they are independent. E is 1 for a
    single number, and the number of classes for a Categorical. Without a closed form both are
    moments of 256 draws.
    """
    base: Any = base_distribution(distribution)
    classes = _class_probabilities(base)
    if classes is not None or isinstance(base, OneHotCategorical | Multinomial):
        mean = base.mean if classes is None else classes
        count = base.total_count if isinstance(base, Multinomial) else 1
        return mean, mean.diag_embed() - _outer(mean) / count
    if not base.event_shape:
        mean, variance = observation_moments(base)
        return mean[..., None], variance[..., None, None]
    if len(base.event_shape) == 1 and hasattr(base, "covariance_matrix"):
        matrix = base.covariance_matrix  # of a Student-t the scatter
        ratio = (base.variance / matrix.diagonal(dim1=-2, dim2=-1)).sqrt()
        return base.mean, matrix * _outer(ratio)
    draws = base.sample(torch.Size([_DRAWS])).flatten(1 + len(base.batch_shape))
    mean = draws.mean(0)
    return mean, _outer(draws - mean).mean(0)


def _outer(vectors: Tensor) -> Tensor:
    return vectors[..., :, None] * vectors[..., None, :]


def _class_probabilities(base: Any) -> Tensor | None:
    """The probability of each class in the last dimension, also of a mixture over classes."""
    if isinstance(base, Categorical):
        return base.probs
    if not isinstance(base, MixtureSameFamily):
        return None
    inner = _class_probabilities(base_distribution(base.component_distribution))
    if inner is None:
        return None
    weights = base.mixture_distribution.probs
    spread = weights.reshape(weights.shape + (1,) * (inner.dim() - weights.dim()))
    return (spread * inner).sum(weights.dim() - 1)

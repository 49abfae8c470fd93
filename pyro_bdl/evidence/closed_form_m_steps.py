"""M-steps in closed form: parameters of exponential families from expected statistics.

Where an argument of a site's distribution consists of entries of one parameter theta, as
``Normal(mu[z], sigma[z])`` does, the maximum of the expected log density in theta is a ratio of
weighted sums over the elements e that hold the entry i:

    theta_i = finish( sum_{e: i(e)=i} r_e T(y_e) / sum_{e: i(e)=i} r_e c(y_e) )

with r the posterior probabilities of the discrete sites (Dempster, Laird and Rubin 1977).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pyro_bdl.distributions.take_apart import without_wrappers


class Mean(NamedTuple):
    """One argument of a family: the statistic T, its size c, and the map from their ratio."""

    statistic: Callable[[Any, Tensor], Tensor]
    size: Callable[[Any, Tensor], Tensor]
    finish: Callable[[Tensor], Tensor] = torch.clone


class WeightedSite(NamedTuple):
    """A site's distribution and value, and the weights of its assignments.

    :param weights: posterior probability times scale and mask, of the log density's shape.
    """

    distribution: Any
    value: Tensor
    weights: Tensor


class Selection(NamedTuple):
    """An argument whose elements are entries of a parameter.

    :param entries: for each element of the argument the entry's flat index.
    """

    parameter: str
    entries: Tensor


def _value(distribution: Any, value: Tensor) -> Tensor:
    return value


def _ones(distribution: Any, value: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.get_default_dtype(), device=value.device)


def _one_hot(distribution: Any, value: Tensor) -> Tensor:
    return functional.one_hot(value.long(), distribution.param_shape[-1])


def _outer(distribution: Any, value: Tensor) -> Tensor:
    offset = value - distribution.loc
    return offset.unsqueeze(-1) * offset.unsqueeze(-2)


def _cholesky(matrix: Tensor) -> Tensor:
    return torch.linalg.cholesky_ex(matrix).L  # not finite for a component without data


def _inverse(matrix: Tensor) -> Tensor:
    return torch.linalg.inv_ex(matrix).inverse


_PROBABILITY = Mean(_value, _ones)
LOCATIONS = {
    ("Normal", "loc"): Mean(
        lambda d, y: y / d.scale.square(), lambda d, y: d.scale.square().reciprocal()
    ),
    ("LogNormal", "loc"): Mean(
        lambda d, y: y.log() / d.scale.square(), lambda d, y: d.scale.square().reciprocal()
    ),
    ("MultivariateNormal", "loc"): _PROBABILITY,
    ("Bernoulli", "probs"): _PROBABILITY,
    ("Bernoulli", "logits"): Mean(_value, _ones, torch.logit),
    ("Categorical", "probs"): Mean(_one_hot, _ones),
    ("OneHotCategorical", "probs"): _PROBABILITY,
    ("Multinomial", "probs"): Mean(_value, lambda d, y: y.sum(-1, keepdim=True)),
    ("Binomial", "probs"): Mean(_value, lambda d, y: d.total_count),
    ("Geometric", "probs"): Mean(_ones, lambda d, y: 1.0 + y),
    ("Poisson", "rate"): _PROBABILITY,
    ("Exponential", "rate"): Mean(_ones, _value),
    ("Gamma", "rate"): Mean(lambda d, y: d.concentration, _value),
}
SPREADS = {
    ("Normal", "scale"): Mean(lambda d, y: (y - d.loc).square(), _ones, torch.sqrt),
    ("LogNormal", "scale"): Mean(lambda d, y: (y.log() - d.loc).square(), _ones, torch.sqrt),
    ("MultivariateNormal", "covariance_matrix"): Mean(_outer, _ones),
    ("MultivariateNormal", "scale_tril"): Mean(_outer, _ones, _cholesky),
    ("MultivariateNormal", "precision_matrix"): Mean(_outer, _ones, _inverse),
}


def tables_of(distribution: Any) -> tuple[Any, dict[str, Mean]]:
    """Return a distribution without wrappers, and its arguments that have a closed form."""
    base, _ = without_wrappers(distribution)
    family = type(base).__name__
    return base, {
        argument: mean for (name, argument), mean in (LOCATIONS | SPREADS).items() if name == family
    }


def selections(
    sites: Mapping[str, tuple[Any, Any]], markers: tuple[Mapping[str, Tensor], ...]
) -> dict[tuple[str, str], Selection]:
    """Find the arguments that consist of entries of one parameter.

    :param sites: for each site its distribution where the parameters have the first markers for
        values, and where they have the second ones.
    :param markers: parameter -> values, all of them different, twice.
    :returns: (site, argument) -> the parameter and the entries' indices.
    """
    found = {}
    for name, distributions in sites.items():
        bases = [tables_of(each)[0] for each in distributions]
        for argument, mean in tables_of(distributions[0])[1].items():
            values = [_shrunk(getattr(base, argument)) for base in bases]
            matrix = mean.statistic is _outer
            for parameter in markers[0]:
                pairs = [(values[i], markers[i][parameter].reshape(-1)) for i in range(2)]
                index = _index(*pairs[0], matrix)
                if all(_holds(value, marker, index) for value, marker in pairs):
                    found[name, argument] = Selection(parameter, index)
    return found


def _shrunk(argument: Tensor) -> Tensor:
    """The argument with one element for each dimension along which it repeats itself."""
    for dim in range(argument.dim()):
        if argument.stride(dim) == 0 and argument.shape[dim] > 1:
            argument = argument.narrow(dim, 0, 1)
    return argument


def _index(value: Tensor, marker: Tensor, matrix: bool) -> Tensor:
    """For each element of ``value`` the nearest marker; for matrices those of one block."""
    if matrix:
        size = value.shape[-1]
        first = _index(value[..., 0, 0], marker, False)
        block = torch.arange(size * size, device=value.device).view(size, size)
        return (first[..., None, None] + block).clamp(max=len(marker) - 1)
    ordered, order = marker.sort()
    above = torch.searchsorted(ordered, value.contiguous()).clamp(max=len(ordered) - 1)
    below = (above - 1).clamp(min=0)
    nearer = (value - ordered[below]).abs() < (ordered[above] - value).abs()
    return order[torch.where(nearer, below, above)]


def _holds(value: Tensor, marker: Tensor, index: Tensor) -> bool:
    return torch.allclose(value, marker[index], rtol=1e-5, atol=1e-7)


def maximizer(
    uses: list[tuple[WeightedSite, str, Selection]],
    table: Mapping[tuple[str, str], Mean],
    like: Tensor,
) -> Tensor | None:
    """Return the value of a parameter that maximizes the expected log density.

    :param uses: the sites that hold it, in which argument, the same for all, and where.
    :param table: ``LOCATIONS`` or ``SPREADS``.
    :param like: its present value; entries that no weight falls on keep it.
    :returns: None if the argument is not in the table.
    """
    finish = None
    sums = [torch.zeros_like(like).reshape(-1) for _ in range(2)]
    for factor, argument, selection in uses:
        base, event_dims = without_wrappers(factor.distribution)
        mean = table.get((type(base).__name__, argument))
        if mean is None:
            return None
        finish = mean.finish
        shape = getattr(base, argument).shape
        weights = factor.weights[
            (...,) + (None,) * (event_dims + len(shape) - len(base.batch_shape))
        ]
        for total, part in zip(sums, (mean.statistic, mean.size), strict=True):
            _add(total, weights * part(base, factor.value), shape, selection.entries)
    assert finish is not None
    ratio, tiny = sums[0] / sums[1], torch.finfo(like.dtype).tiny
    result = finish(ratio.reshape(like.shape))
    return torch.where((sums[1] > tiny).reshape(like.shape), result, like)


def _add(total: Tensor, values: Tensor, shape: torch.Size, index: Tensor) -> None:
    """Add each element of ``values`` to the entry of ``total`` that ``index`` gives it.

    :param shape: the argument's shape; ``values`` repeat along dimensions that they lack.
    """
    shape = torch.broadcast_shapes(values.shape, shape)
    index = index[(None,) * (len(shape) - index.dim())]
    values = values.expand(shape).sum_to_size(index.shape)
    total.index_add_(0, index.reshape(-1), values.reshape(-1).to(total))

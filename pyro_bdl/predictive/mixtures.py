"""Moments of a mixture from those of its components, by the law of total variance.

E[f] = sum_k weight_k E_k[f],  Cov[f] = sum_k weight_k (Cov_k[f] + d_k d_k'),  d_k = E_k[f] - E[f]
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.predictive.linearized_component import ParameterMoments


def averaged(weights: Tensor, values: Iterable[Tensor]) -> Tensor:
    """sum_k weight_k values_k."""
    values = list(values)
    if len(values) == 1:
        return values[0]
    stacked = torch.stack(values)
    return torch.tensordot(weights.to(stacked), stacked, dims=1)


def combined(weights: Tensor, members: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Moments of the mixture by site.

    :param weights: (K,), with sum 1.
    :param members: of each component its moments by site: ``ParameterMoments``, or pairs of a mean
        and a variance, a covariance of the last dimension, or a covariance of all numbers.
    """
    if len(members) == 1:
        return members[0]
    return {name: _of_site(weights, [values[name] for values in members]) for name in members[0]}


def _of_site(weights: Tensor, parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, ParameterMoments):
        total = {
            key: _total(weights, [p.mean[key] for p in parts], [p.variance[key] for p in parts])
            for key in first.mean
        }
        noises: Any = [part.noise_variance for part in parts]
        noise = None if noises[0] is None else averaged(weights, noises)
        means, variances = ({key: pair[i] for key, pair in total.items()} for i in range(2))
        return ParameterMoments(means, variances, noise)
    pair = _total(weights, *zip(*parts, strict=True))
    return type(first)(*pair) if hasattr(first, "_fields") else pair


def _total(
    weights: Tensor, means: Sequence[Tensor], spreads: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The mean, and the variance or covariance in the shape of ``spreads``."""
    stacked, inside = torch.stack(list(means)), torch.stack(list(spreads))
    mean = averaged(weights, stacked)
    offset = stacked - mean
    if inside.dim() == offset.dim():
        between = offset.square()
    elif inside.dim() == offset.dim() + 1:
        between = offset[..., :, None] * offset[..., None, :]
    else:
        flat = offset.flatten(1)
        between = (flat[:, :, None] * flat[:, None, :]).reshape(inside.shape)
    return mean, averaged(weights, inside + between)

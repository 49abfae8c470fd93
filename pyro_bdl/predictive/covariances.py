"""Covariances of several observed numbers, from draws or in closed form."""

from typing import NamedTuple

import torch
from torch import Tensor


class PredictiveCovariance(NamedTuple):
    """The joint moments of the D numbers of each observation, over posterior and noise.

    :param mean: E[y], (N, D), in units of y.
    :param covariance: Cov[y], (N, D, D), or over all data (N, D, N, D), in squared units of y.
    """

    mean: Tensor
    covariance: Tensor


def total_covariance(mean: Tensor, noise: Tensor, *, joint: bool) -> PredictiveCovariance:
    """Cov[y] = E[Cov[y | w]] + Cov[E[y | w]], over draws of w.

    :param mean: E[y | w], (S, *batch, E), as of ``observation_covariance``; the first batch
        dimension is the data's.
    :param noise: Cov[y | w], (S, *batch, E, E).
    """
    data = mean.shape[1] if mean.dim() > 2 else 1
    flat = mean.reshape(len(mean), data, -1)
    center = flat.mean(0)
    spread = flat - center
    if joint:
        inside = torch.einsum("snd,sme->ndme", spread, spread) / len(mean)
    else:
        inside = torch.einsum("snd,sne->nde", spread, spread) / len(mean)
    return PredictiveCovariance(center, with_noise(inside, noise.mean(0)))


def with_noise(covariance: Tensor, noise: Tensor) -> Tensor:
    """Add the covariance of the noise, which is independent between data and between events.

    :param covariance: (N, D, D) or (N, D, N, D).
    :param noise: (*batch, E, E), with N D entries of events in all.
    """
    data, size, events = covariance.shape[0], covariance.shape[1], noise.shape[-1]
    blocks = noise.reshape(data, size // events, events, events)
    result = covariance.clone()
    own = result if result.dim() == 3 else result.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    for start in range(blocks.shape[1]):
        part = slice(start * events, (start + 1) * events)
        own[:, part, part] += blocks[:, start]
    return result

"""Ordered classes by cumulative logits, from logits that neither cancel nor underflow."""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


class OrderedLogistic(dist.OrderedLogistic):
    """Pyro's ``OrderedLogistic`` with logits: P(y <= k) = sigmoid(c_k - f), c_0 < c_1 < ...

    Pyro's own has the differences of two probabilities, which cancel far from the cut points, and
    writes them in place, which ``vmap`` cannot follow. Here log P(y = k) is
    log sigmoid(c_k - f) + log sigmoid(f - c_(k-1)) + log(1 - exp(c_(k-1) - c_k)).

    :param predictor: f, ``(*batch)``.
    :param cutpoints: c, ``(*batch, K - 1)`` or fewer batch dimensions, increasing.

    Source: McCullagh (1980), Regression models for ordinal data.
    """

    def __init__(
        self, predictor: Tensor, cutpoints: Tensor, validate_args: bool | None = None
    ) -> None:
        gap = cutpoints - predictor[..., None]
        below, above = logsigmoid(gap), logsigmoid(-gap)
        between = torch.log(-torch.expm1(cutpoints[..., :-1] - cutpoints[..., 1:]))
        inner = below[..., 1:] + above[..., :-1] + between
        self.predictor, self.cutpoints = predictor.expand(gap.shape[:-1]), cutpoints.expand_as(gap)
        logits = torch.cat([below[..., :1], inner, above[..., -1:]], -1)
        dist.Categorical.__init__(self, logits=logits, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "OrderedLogistic":
        batch_shape = torch.Size(batch_shape)
        cutpoints = self.cutpoints.expand(*batch_shape, self.cutpoints.shape[-1])
        return type(self)(self.predictor.expand(batch_shape), cutpoints, self._validate_args)

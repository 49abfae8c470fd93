"""Which rows to label next, from draws of class probabilities.

For numbers, rank by ``pyro_bdl.metrics.variance_parts(mean, noise).epistemic``. With few labels the
rows of the largest scores can be odd ones, and worse than random rows: draw rows in proportion to
them instead, ``scores.multinomial(size)`` (Kirsch et al. 2023; see "Published tables, reproduced").
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_bdl.metrics.blocks import check_probabilities
from pyro_bdl.metrics.uncertainty import entropy_parts
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.random_state import checked_seed
from pyro_bdl.utils.validation import require_tensors, whole_number

__all__ = ["Chosen", "bald", "batch_bald", "epig"]

_ELEMENTS_AT_ONCE = 2**24


class Chosen(NamedTuple):
    """Rows to label and what they tell.

    :ivar rows: indices in the order of choice, (size,).
    :ivar information: I(y_1, ..., y_b; w) in nats of the first b rows, (size,).
    """

    rows: Tensor
    information: Tensor


def bald(probabilities: Tensor) -> Tensor:
    """I(y; w) of each row in nats, (N,), the information of its label about the weights.

    ::

        BALD(x)  =  H[E p(y | x, w)]  -  E H[p(y | x, w)]

    Where draws differ little, an average over S of them is too small by about its S-th part.

    :param probabilities: ``(S, N, C)``, as of ``Predictive(...).mean(x)["y"]``.

    Source: Houlsby et al. (2011), Bayesian active learning for classification.
    """
    return entropy_parts(_checked(probabilities, "probabilities")).epistemic


def epig(probabilities: Tensor, targets: Tensor) -> Tensor:
    """E I(y; y*) of each row in nats, (N,), the information of its label about predictions.

    ::

        EPIG(x)  =  E_x* [ KL(p(y, y* | x, x*)  ||  p(y | x) p(y* | x*)) ],
        p(y, y* | x, x*)  =  E_w p(y | x, w) p(y* | x*, w)

    Draws that agree by chance add about 2 BALD(x) BALD(x*) / S to it.

    :param probabilities: ``(S, N, C)`` of the rows that could be labeled.
    :param targets: ``(S, M, C)`` of inputs that predictions are wanted for, at the same draws.
    :raises ValueError: if the draws are not as many.

    Source: Bickford Smith et al. (2023), Prediction-oriented Bayesian active learning, eq. 5.
    """
    p, q = _checked(probabilities, "probabilities"), _checked(targets, "targets")
    if p.shape[0] != q.shape[0]:
        raise ValueError(
            f"targets must come from the {p.shape[0]} draws of the probabilities, not from "
            f"{q.shape[0]}: predict both with the same samples"
        )
    p, q = double(p.detach()), double(q.detach())
    alone = _entropy(q.mean(0)).mean()
    rows = max(1, _ELEMENTS_AT_ONCE // (p.shape[2] * q.shape[1] * q.shape[2]))
    parts = []
    for part in p.split(rows, 1):
        joint = torch.einsum("snc,smd->nmcd", part, q) / len(p)
        together = _entropy(joint.flatten(-2)).mean(1)
        parts.append((_entropy(part.mean(0)) + alone - together).clamp_min(0.0))
    return torch.cat(parts)


def batch_bald(
    probabilities: Tensor, size: int, *, num_configurations: int = 10_000, seed: int = 0
) -> Chosen:
    """Rows whose labels together tell most of the weights, chosen one after another.

    ::

        I(y_1, ..., y_b; w)  =  H[E_w prod_i p(y_i | w)]  -  sum_i E H[p(y_i | w)]

    The joint entropy is exact while the labels of the rows chosen so far have at most
    ``num_configurations`` values; beyond, these are drawn from their joint distribution. Unlike the
    rows of largest `bald`, two that say the same are not both chosen.

    :param probabilities: ``(S, N, C)``.
    :param size: rows to choose, from 1 to N.
    :raises ValueError: for another size.

    Source: Kirsch et al. (2019), BatchBALD, sections 3.2 and 3.3; greedy choice reaches
    1 - 1/e of the best.
    """
    p = double(_checked(probabilities, "probabilities").detach())
    draws, count, _ = p.shape
    size = whole_number(size, "size", most=count)
    limit = whole_number(num_configurations, "num_configurations")
    random = torch.Generator(p.device).manual_seed(checked_seed(seed))
    expected = _entropy(p).mean(0)
    labels = _Labels(torch.ones(1, draws, dtype=p.dtype, device=p.device), None)
    chosen: list[int] = []
    information: list[Tensor] = []
    for _ in range(size):
        gain = labels.entropy_with(p) - expected - sum(expected[row] for row in chosen)
        gain[chosen] = -math.inf
        best = int(gain.argmax())
        information.append(gain[best].clamp_min(0.0))
        chosen.append(best)
        labels = labels.extended(p[:, best], limit, random)
    return Chosen(torch.tensor(chosen, device=p.device), torch.stack(information))


class _Labels(NamedTuple):
    """Joint labels of the rows chosen so far.

    :ivar likelihood: p(labels | w_s), (K, S).
    :ivar probability: p(labels) of drawn ones, (K,); None if all there are stand here.
    """

    likelihood: Tensor
    probability: Tensor | None

    def entropy_with(self, p: Tensor) -> Tensor:
        """The entropy of these labels and that of each row, (N,)."""
        draws, _, classes = p.shape
        rows = max(1, _ELEMENTS_AT_ONCE // (len(self.likelihood) * classes))
        parts = []
        for part in p.split(rows, 1):
            joint = torch.einsum("ks,snc->nkc", self.likelihood, part) / draws
            if self.probability is None:
                parts.append(_entropy(joint.flatten(1)))
            else:
                inner = torch.special.entr(joint).sum(-1)
                parts.append((inner / self.probability).mean(1))
        return torch.cat(parts)

    def extended(self, p: Tensor, limit: int, random: torch.Generator) -> "_Labels":
        """These labels with that of one more row, of probabilities (S, C)."""
        every = self.likelihood[:, None] * p.T  # (K, C, S)
        if self.probability is not None:  # a label for each of the drawn ones
            label = torch.multinomial(every.mean(-1), 1, generator=random)
            drawn = every.gather(1, label[..., None].expand(-1, 1, every.shape[-1]))[:, 0]
            return _Labels(drawn, drawn.mean(-1))
        every = every.flatten(0, 1)
        if len(every) <= limit:
            return _Labels(every, None)
        joint = every.mean(-1)
        drawn = torch.multinomial(joint, limit, replacement=True, generator=random)
        return _Labels(every[drawn], joint[drawn])


def _entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1)


def _checked(probabilities: Tensor, name: str) -> Tensor:
    require_tensors(**{name: probabilities})
    if probabilities.ndim != 3:
        raise ValueError(
            f"{name} must be draws of class probabilities (S, N, C), got shape "
            f"{tuple(probabilities.shape)}"
        )
    check_probabilities(probabilities, name)
    return probabilities

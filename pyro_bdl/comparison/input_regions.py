"""Where test inputs lie relative to the training inputs: near them, between or beyond them."""

import torch
from torch import Tensor

_MOST_TRAINING = 4096
_FAR = 2.0  # times the spacing of the training inputs


def regions(test: tuple[Tensor, ...], train: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """A mask over the test rows for each region: ``near``, ``between`` and ``beyond``.

    Near is an input that is no further from a training input than twice the distance that 95 % of
    the training inputs have to their nearest neighbour. The others lie between the training inputs
    where every feature is within its training range, beyond them otherwise. Features count in
    their training sds; of many training inputs evenly spaced ones are taken.

    :param test: input tensors of N rows.
    :param train: as many input tensors, of M rows.
    :returns: bool ``(N,)`` each; nothing for inputs that are not numbers, or fewer than 3 rows.
    """
    if len(test) != len(train) or not all(x.is_floating_point() for x in (*test, *train)):
        return {}
    points, known = _flat(test), _flat(train)
    if len(known) < 3 or points.shape[1] != known.shape[1]:
        return {}
    if len(known) > _MOST_TRAINING:
        rows = torch.arange(_MOST_TRAINING, device=known.device) * len(known) // _MOST_TRAINING
        known = known[rows]
    low, high = known.amin(0), known.amax(0)
    sd = known.std(0)
    sd = torch.where(sd > 0, sd, torch.ones_like(sd))
    among = torch.cdist(known / sd, known / sd).fill_diagonal_(torch.inf).amin(1)
    spacing = among.quantile(0.95)
    near = torch.cdist(points / sd, known / sd).amin(1) <= _FAR * spacing
    within = ((points >= low) & (points <= high)).all(1)
    return {"near": near, "between": ~near & within, "beyond": ~near & ~within}


def _flat(inputs: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([x.detach().double().reshape(len(x), -1) for x in inputs], 1)

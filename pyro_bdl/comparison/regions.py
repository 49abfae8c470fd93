"""Test inputs near, between and beyond the training inputs."""

from typing import Any

import torch
from torch import Tensor

from pyro_bdl.utils.precision import double
from pyro_bdl.utils.trees import tree_leaves

REGIONS = {
    "near": "near training inputs",
    "between": "between training inputs, far from all of them",
    "beyond": "beyond the training inputs, far from all of them",
}
_MOST_TRAINING = 4096
_FAR = 2.0  # times the spacing of the training inputs


def regions(test: tuple[Any, ...], train: tuple[Any, ...]) -> dict[str, Tensor]:
    """A mask over the test rows for each region: ``near``, ``between`` and ``beyond``.

    An input is near if its distance to a training input is at most twice the 95 % quantile of the
    distances between training inputs and their nearest neighbors. Other inputs lie between the
    training inputs if every feature is within its training range, else beyond them. Features are
    divided by their training sds. If there are many training inputs, evenly spaced ones are used.

    :param test: inputs of N rows, tensors or dicts of them.
    :param train: as many inputs, of M rows.
    :returns: bool ``(N,)`` each; nothing for inputs that are not numbers, or fewer than 3 rows.
    """
    tensors, others = tree_leaves(test), tree_leaves(train)
    if not tensors or len(tensors) != len(others):
        return {}
    if not all(x.is_floating_point() for x in tensors + others):
        return {}
    points, known = _flat(tensors), _flat(others)
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


def _flat(inputs: list[Tensor]) -> Tensor:
    return torch.cat([double(x.detach()).reshape(len(x), -1) for x in inputs], 1)

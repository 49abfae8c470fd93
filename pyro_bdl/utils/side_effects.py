"""Runs without side effects on random states and buffers."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
from torch import Tensor, nn

from pyro_bdl.utils.random_state import own_randomness


@contextmanager
def without_side_effects(
    modules: Iterable[nn.Module], tensors: Iterable[Tensor] = ()
) -> Iterator[None]:
    """Run without side effects: random states and buffers are restored on exit.

    Random numbers of Python and numpy follow a fixed seed: a trace takes them for constants.

    :param modules: the modules whose buffers are restored.
    :param tensors: other tensors to restore.
    """
    buffers = (buffer for module in modules for buffer in module.buffers(recurse=False))
    kept = [*tensors, *buffers]
    values = [tensor.detach().clone() for tensor in kept]
    try:
        with own_randomness():
            random.seed(0)
            np.random.seed(0)
            yield
    finally:
        for tensor, value in zip(kept, values, strict=True):
            tensor.data.copy_(value)

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

    Torch's random numbers continue from the caller's state, which is restored. Python's and numpy's
    random numbers follow a fixed seed, because a trace takes them for constants.

    :param modules: the modules whose buffers are restored.
    :param tensors: other tensors to restore.
    """
    buffers = (buffer for module in modules for buffer in module.buffers(recurse=False))
    kept = [*tensors, *buffers]
    values = [tensor.detach().clone() for tensor in kept]
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    try:
        with own_randomness():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for tensor, value in zip(kept, values, strict=True):
            tensor.data.copy_(value)

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

    Torch's random numbers go on from the caller's, who draws them again afterwards. Those of
    Python and numpy, which a trace takes for constants, follow a seed.

    :param modules: whose buffers are kept.
    :param tensors: that keep their values as well.
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

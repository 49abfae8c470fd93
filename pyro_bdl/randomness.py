"""Random numbers that follow a seed, and leave the caller's alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's random numbers follow ``seed`` inside; the caller's go on as before after."""
    with own_randomness():
        torch.manual_seed(seed)
        yield


@contextmanager
def own_randomness() -> Iterator[None]:
    """What is drawn inside leaves no trace in the caller's random numbers."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield

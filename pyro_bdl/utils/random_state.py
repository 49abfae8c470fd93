"""Random numbers that follow a seed and leave those of the caller alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's random numbers; on exit the caller's go on as before."""
    with own_randomness():
        torch.manual_seed(seed)
        yield


@contextmanager
def own_randomness() -> Iterator[None]:
    """Restore torch's random states on exit."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield


def fixed_normal(like: Tensor, seed: int = 0) -> Tensor:
    """Standard normal numbers of the shape, dtype and device of ``like``, the same ones on every
    device and in every call."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(like.shape, generator=generator, device="cpu").to(like)

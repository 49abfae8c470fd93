"""What a posterior costs: memory of the fit, numbers to keep, time of a draw."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyro_bdl.predictive.linearized import LinearizedPredictive, is_linear
from pyro_bdl.predictive.sampled import Predictive
from pyro_bdl.samples import Samples

_DRAWS = 100


@dataclass
class Peak:
    """:param bytes: the most memory beyond what was in use at the start; None where the system
    does not tell."""

    bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measures the block inside: on CUDA what torch allocated there, on Linux the process's
    resident memory, elsewhere nothing."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before: int | None = torch.cuda.memory_allocated(device)
    else:
        before = _resident("VmRSS") if device.type == "cpu" and _forget_peak() else None
    yield peak
    if before is None:
        return
    after = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")
    peak.bytes = None if after is None else max(0, after - before)


def numbers_held(posterior: Any) -> int | None:
    """How many numbers the posterior consists of: a guide's parameters and, of a Gaussian made
    from curvature or snapshots, its tensors; of ``Samples`` all draws. None where unknown."""
    if isinstance(posterior, Samples):
        return sum(value.numel() for value in posterior.latents.values())
    if not isinstance(posterior, nn.Module):
        return None
    seen = {
        p.data_ptr(): p.numel() for p in posterior.state_dict().values() if p.is_floating_point()
    }
    return sum(seen.values()) or None


def seconds_per_draw(
    model: Callable, posterior: Any, *inputs: Tensor, num_samples: int = _DRAWS
) -> float:
    """Wall-clock time of one predictive draw at all inputs, drawing the latents included.

    :param inputs: the program's arguments without the targets.
    :param num_samples: draws over which the time is averaged.
    """
    if isinstance(posterior, Samples):
        num_samples = min(num_samples, posterior.num_chains * posterior.num_draws)
    kind: Any = LinearizedPredictive if is_linear(posterior) else Predictive
    predictive = kind(model, posterior, num_samples)
    wait_for(predictive(*inputs, None))  # whatever is made only once
    started = time.perf_counter()
    wait_for(predictive(*inputs, None))
    return (time.perf_counter() - started) / num_samples


def wait_for(results: Any) -> None:
    """Return when the tensors among results are computed: a GPU works while the host goes on."""
    tensors = (leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor))
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def _forget_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(found[0]) * 1024 if found else None

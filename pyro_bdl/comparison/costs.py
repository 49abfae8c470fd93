"""Costs of a posterior and what its fit tells: time, memory, size, bounds of the evidence."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bdl.guides import LaplaceGuide
from pyro_bdl.samples import Samples
from pyro_bdl.utils.tables import Column
from pyro_bdl.utils.trees import tree_leaves

COLUMNS = (
    Column("seconds", "seconds", help="Wall-clock time of the fit."),
    Column(
        "elbo",
        "ELBO",
        digits=4,
        help="Evidence lower bound at temperature 1, in nats: a lower bound of the log evidence of "
        "the program, with the same prior in every row, on the training data as it sees them; "
        "larger is better. Of a Laplace approximation it is the bound of its Gaussian through the "
        "network, not of the linear model.",
    ),
)
FURTHER_COLUMNS = (
    Column(
        "log_evidence",
        "log evid.",
        digits=4,
        help="Log evidence of a Laplace approximation, in nats: no bound, and of another model in "
        "every row, with the prior scales and noise that it chose, of the linearized network or "
        "of a subset of the weights given the others. Compare it between settings of one row, not "
        "between rows nor with an ELBO.",
    ),
    Column(
        "draw_seconds",
        "s / draw",
        help="Wall-clock time of one predictive draw at all test points.",
    ),
    Column(
        "numbers",
        "numbers",
        help="How many numbers the posterior consists of: variational parameters, or all draws.",
    ),
    Column("memory", "MiB", help="Peak memory of the fit beyond the memory in use before it."),
)
OF_PARAMETERS = (
    Column(
        "gamma",
        "gamma",
        help="Effective number of parameters: how many the data determine, the others being left "
        "to the prior (MacKay 1992).",
    ),
    Column("latents", "of", help="How many parameters there are: the most that gamma can be."),
)
FURTHER_OF_PARAMETERS = (Column("fitted", "data", help="How many data gamma is about."),)


GAMMA_NEARLY_ALL, GAMMA_NEARLY_NONE = 0.9, 0.05  # of what the data may determine


@dataclass(frozen=True)
class Costs:
    """Costs of one posterior and bounds from its fit, each None if unknown.

    :param seconds: wall-clock time of the fit; ``Samples`` hold their own.
    :param elbo: ELBO at temperature 1, in nats.
    :param log_evidence: log marginal likelihood, in nats.
    :param peak_memory: peak memory of the fit in bytes, see ``peak_memory``.
    """

    seconds: float | None = None
    elbo: float | None = None
    log_evidence: float | None = None
    peak_memory: int | None = None

    def scores(self, posterior: Any) -> dict[str, Any]:
        """The known numbers by the keys of the columns.

        :param posterior: a guide, ``Samples`` or ``PredictiveDraws``.
        """
        seconds, memory = self.seconds, self.peak_memory
        if seconds is None and isinstance(posterior, Samples):
            seconds = posterior.info.get("seconds")
        found = {
            "seconds": seconds,
            "elbo": self.elbo,
            "log_evidence": self.log_evidence,
            "numbers": numbers_held(posterior),
            "memory": None if memory is None else memory / 2**20,
        }
        return {key: value for key, value in found.items() if value is not None}


@dataclass
class Peak:
    """Peak memory of a block of code.

    :param bytes: peak memory beyond the memory in use at the start; None if unknown.
    """

    bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the peak memory of the block inside the context.

    On CUDA it is the memory that torch allocates, on Linux the resident memory of the process. On
    other systems it is unknown.
    """
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
    """Count the numbers that the posterior consists of; None if unknown.

    For a guide these are its parameters and, for a Gaussian from curvature or snapshots, its
    tensors; for ``Samples`` all draws.
    """
    if isinstance(posterior, Samples):
        return sum(value.numel() for value in posterior.latents.values())
    if not isinstance(posterior, nn.Module):
        return None
    seen = {
        p.data_ptr(): p.numel() for p in posterior.state_dict().values() if p.is_floating_point()
    }
    return sum(seen.values()) or None


def wait_for(results: Any) -> None:
    """Wait until the tensors among results are computed: a GPU works asynchronously."""
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


def determined(posterior: Any) -> dict[str, Any]:
    """gamma of P parameters and N data by the keys of the columns; nothing for other posteriors."""
    if not isinstance(posterior, LaplaceGuide):
        return {}
    with torch.no_grad():
        gamma = float(posterior.effective_parameters())
    return {"gamma": gamma, "latents": posterior.subset.size, "fitted": posterior.num_data}

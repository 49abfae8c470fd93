"""Numbers of a posterior besides its scores: costs, bounds of the evidence, convergence.

A metric names its inputs by ``of``:

=================  ==============================================================================
``"costs"``        the ``Costs`` and the posterior
``"drawing"``      seconds that all predictive draws took, and their number
``"laplace"``      a Laplace approximation
``"mixing"``       the ``Mixing`` of Markov chains
``"time"``         their ``Mixing`` and the seconds of the fit
``"gradients"``    their ``Mixing`` and how many gradients the draws took
``"samples"``      the ``Samples``
``"sensitivity"``  of chains, the named latent that moves most with the prior, and its row of
                   ``diagnostics.prior_sensitivity``
=================  ==============================================================================
"""

import gc
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_bdl import diagnostics
from pyro_bdl.comparison.columns import listed, with_error
from pyro_bdl.comparison.metric import evenly, metric, metrics_of
from pyro_bdl.diagnostics.convergence import separate_modes
from pyro_bdl.diagnostics.rhat import SHARE, limit_of_rhat
from pyro_bdl.diagnostics.summary import sampler_statistics
from pyro_bdl.guides import LaplaceGuide
from pyro_bdl.program.samples import Samples
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.trees import tensors_in

_LEAST_DRAWS = 4
_MOST_WEIGHTS, _MOST_TIMES = 1000, 200  # of each site, evenly spaced, by which modes are counted
cost = partial(metric, group="costs", detail=True)
parameters = partial(metric, group="parameters that the data determine")
chains = partial(metric, group="Markov chains")


@dataclass(frozen=True)
class Costs:
    """Costs of one posterior and bounds from its fit, each None if unknown.

    :param seconds: wall-clock time of the fit; ``Samples`` hold their own.
    :param elbo: ELBO at temperature 1, in nats.
    :param log_evidence: log marginal likelihood, in nats.
    :param peak_memory: peak memory of the fit in bytes, see ``peak_memory``.
    :param elbo_error: standard error of ``elbo`` over the draws, in nats.
    """

    seconds: float | None = None
    elbo: float | None = None
    log_evidence: float | None = None
    peak_memory: int | None = None
    elbo_error: float | None = None

    def inputs(self, posterior: Any, mixing: "Mixing | None" = None) -> dict[str, tuple]:
        """The inputs of the metrics below, as far as they are known.

        :param posterior: of ``Samples``, the statistic ``num_steps`` counts the gradients.
        :param mixing: of its chains.
        """
        known: dict[str, tuple] = {"costs": (self, posterior)}
        stats = posterior.stats if isinstance(posterior, Samples) else {}
        if isinstance(posterior, LaplaceGuide):
            known["laplace"] = (posterior,)
        if isinstance(posterior, Samples):
            known["samples"] = (posterior,)
        if mixing is not None and (spent := seconds.function(self, posterior)):
            known["time"] = mixing, spent
        if mixing is not None and "num_steps" in stats:
            known["gradients"] = mixing, float(double(stats["num_steps"]).sum())
        return known


# --------------------------------------------------------------------------------------- costs


@metric("seconds", "costs")
def seconds(costs: Costs, posterior: Any) -> float | None:
    """Wall-clock time of the fit."""
    own = posterior.info.get("seconds") if isinstance(posterior, Samples) else None
    return own if costs.seconds is None else costs.seconds


@metric("ELBO", "costs", digits=4, error=True)
def elbo(costs: Costs, posterior: Any) -> tuple[float | None, float | None]:
    """Evidence lower bound at temperature 1, in nats: a lower bound of the log evidence of the
    program, with the same prior in every row, on the training data as it sees them; larger is
    better. With its standard error over the draws. Of a Laplace approximation it is the bound of
    its Gaussian through the network, not of the linear model."""
    return costs.elbo, costs.elbo_error


@cost("log evid.", "costs", digits=4)
def log_evidence(costs: Costs, posterior: Any) -> float | None:
    """Log marginal likelihood (evidence) of a Laplace approximation, in nats: no bound, and of
    another model in every row, with the prior scales and noise that it chose, of the linearized
    network or of a subset of the weights given the others. Compare it between settings of one row,
    not between rows nor with an ELBO. It is a formula without draws, and so without an error over
    them; how far it is from the evidence of the network is not known."""
    return costs.log_evidence


@cost("s / draw", "drawing")
def draw_seconds(seconds: float, draws: int) -> float:
    """Wall-clock time of one predictive draw at all test points."""
    return seconds / draws


@cost("numbers", "costs")
def numbers(costs: Costs, posterior: Any) -> int | None:
    """How many numbers the posterior consists of: variational parameters, or all draws."""
    return numbers_held(posterior)


@cost("MiB", "costs")
def memory(costs: Costs, posterior: Any) -> float | None:
    """Peak memory of the fit beyond the memory in use before it."""
    return None if costs.peak_memory is None else costs.peak_memory / 2**20


@cost("runs", "")
def runs() -> None:
    """How many runs of a method its numbers are the means of; the errors hold their spread."""


# ---------------------------------------------------------- parameters that the data determine


@parameters("gamma", "laplace")
def gamma(posterior: LaplaceGuide) -> Tensor:
    """Effective number of parameters: how many the data determine, the others being left to the
    prior (MacKay 1992)."""
    return posterior.effective_parameters()


@parameters("of", "laplace")
def latents(posterior: LaplaceGuide) -> int:
    """How many parameters there are: the most that gamma can be."""
    return posterior.subset.size


@parameters("data", "laplace", detail=True)
def fitted(posterior: LaplaceGuide) -> int:
    """How many data gamma is about."""
    return posterior.num_data


# --------------------------------------------------------------------------------------- chains


class Mixing(NamedTuple):
    """R-hat and effective sample sizes of bulk and tails ``(K,)`` of the function at the test
    points, and the R-hat above which chains disagree; no numbers of a constant function and of
    fewer than 4 draws. ``chains`` is the number of chains."""

    rhat: Tensor
    ess: Tensor
    tail: Tensor
    limit: float
    chains: int

    @classmethod
    def of(cls, function: Tensor, chains: int) -> "Mixing":
        """The mixing of draws ``(S, N, ...)`` of one chain after the other.

        Quantities that are constant, such as a probability that rounds to 1, are left out.
        """
        draws = len(function) // chains
        by_chain = function.reshape(chains, draws, -1)
        by_chain = by_chain[..., by_chain.flatten(0, 1).std(0) > 0]
        parts = (function.new_full((1,), math.nan),) * 3
        if draws >= _LEAST_DRAWS and by_chain.shape[-1]:
            parts = diagnostics.convergence(by_chain)
        return cls(*parts, limit_of_rhat(chains, draws), chains)


@chains("R-hat", "mixing", digits=4)
def rhat(mixing: Mixing) -> Tensor:
    """R-hat of the function, not exceeded at 95 % of the test points; above its limit, 1.01 for
    long chains, they disagree."""
    return mixing.rhat.nanquantile(SHARE)


@chains("low ESS", "mixing")
def ess_low(mixing: Mixing) -> Tensor:
    """Effective sample size of the function, in draws, reached at 95 % of the test points."""
    return mixing.ess.nanquantile(1 - SHARE)


@chains("low tail ESS", "mixing", detail=True)
def ess_tail(mixing: Mixing) -> Tensor:
    """Effective sample size of the function's 5 % and 95 % quantiles, in draws, reached at 95 % of
    the test points."""
    return mixing.tail.nanquantile(1 - SHARE)


@chains("ESS", "mixing")
def ess_median(mixing: Mixing) -> Tensor:
    """Median effective sample size of the function at the test points, in draws."""
    return mixing.ess.nanquantile(0.5)


@chains("ESS / s", "time")
def ess_per_second(mixing: Mixing, seconds: float) -> Tensor:
    """Median ESS divided by the wall-clock time of the fit, warm-up included."""
    return mixing.ess.nanquantile(0.5) / seconds


@chains("ESS / 1000 grad.", "gradients")
def ess_per_gradient(mixing: Mixing, gradients: float) -> Tensor | None:
    """Median ESS for 1000 gradients of the log density that the draws took, without those of the
    warm-up."""
    return 1000 * mixing.ess.nanquantile(0.5) / gradients if gradients > 0 else None


@chains("div.", "samples")
def divergences(samples: Samples) -> int | None:
    """Draws at which the integrator diverged."""
    return int(samples.stats["diverging"].sum()) if "diverging" in samples.stats else None


@chains("limit of R-hat", "mixing", digits=4, detail=True)
def rhat_limit(mixing: Mixing) -> float:
    """R-hat above which the chains disagree: 1.01, or for short chains what independent draws
    exceed twice in a thousand times."""
    return mixing.limit


@chains("", "mixing")
def num_chains(mixing: Mixing) -> int:
    """The number of chains."""
    return mixing.chains


@chains("diverged", "samples", style="percent", detail=True)
def divergent(samples: Samples) -> Tensor | None:
    """Share of the draws that diverged."""
    known = samples.stats.get("diverging")
    return None if known is None else double(known).mean()


@chains("BFMI", "samples", detail=True)
def bfmi(samples: Samples) -> float | None:
    """Estimated Bayesian fraction of missing information of the worst chain; below 0.3 the tails
    are explored slowly."""
    return sampler_statistics(samples).get("bfmi")


@chains("saturated", "samples", style="percent", detail=True)
def saturated(samples: Samples) -> float | None:
    """Share of the draws that took all the steps that they may, so that their trees were cut."""
    return sampler_statistics(samples).get("saturated")


@chains("modes", "samples", detail=True)
def modes(samples: Samples) -> int | None:
    """How many modes of the latents the chains have stayed in; permuted hidden units make modes of
    one function, which agree in everything else."""
    if samples.num_draws < _LEAST_DRAWS:
        return None
    thin = []
    for values in samples.latents.values():
        by_number = values.reshape(*values.shape[:2], -1).permute(2, 1, 0)
        some = evenly(by_number, 1, _MOST_WEIGHTS).movedim(1, 0)
        thin.append(evenly(some, 1, _MOST_TIMES).permute(2, 0, 1))
    return separate_modes(torch.cat(thin, -1))


@chains("prior sens.", "sensitivity", error=True)
def prior_sensitivity(latent: str, row: Mapping[str, Any]) -> tuple[float, float]:
    """How fast the named latent that moves most does so as the prior of all that depends on no
    other latent is raised to a power, by ``diagnostics.prior_sensitivity`` on the training data;
    above 0.05 the answer depends on the prior."""
    return row["prior"], row["prior_se"]


@chains("of", "sensitivity", style="text")
def prior_sensitive(latent: str, row: Mapping[str, Any]) -> str:
    """The named latent that moves most as the prior is raised to a power."""
    return latent


COSTS = metrics_of(globals())


def sensitivity_notes(evaluations: Mapping[str, Any]) -> list[str]:
    """A sentence for each posterior with latents that depend on the prior."""
    notes = []
    for name, evaluation in evaluations.items():
        words = [
            f"{latent} ({with_error(row['prior'], row['prior_se'])} to the prior, "
            f"{with_error(row['likelihood'], row['likelihood_se'])} to the likelihood: "
            f"{row['diagnosis']})"
            for latent, row in evaluation.sensitivity.items()
            if row["diagnosis"]
        ]
        if words:
            notes.append(
                f"Latents of {name} depend on the prior, by power scaling with the limit 0.05: "
                f"{listed(words)}."
            )
    return notes


# --------------------------------------------------------------------------- numbers and memory


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
    other systems it is unknown. Garbage of before is collected first: freed inside the block, it
    would be taken off the peak.
    """
    peak = Peak()
    gc.collect()
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
    tensors = tensors_in(results)
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
    sizes = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(sizes[0]) * 1024 if sizes else None

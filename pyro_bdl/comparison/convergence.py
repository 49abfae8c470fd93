"""Convergence of Markov chains in function space, and its columns."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pyro_bdl import diagnostics
from pyro_bdl.samples import Samples
from pyro_bdl.utils.tables import Column

_LEAST_DRAWS = 4

COLUMNS = (
    Column(
        "rhat",
        "R-hat",
        digits=4,
        help="Largest R-hat of the function at the test points; above 1.01 the chains disagree.",
    ),
    Column(
        "ess_min",
        "min ESS",
        help="Smallest effective sample size of the function at the test points, in draws.",
    ),
    Column(
        "ess_median",
        "ESS",
        help="Median effective sample size of the function at the test points, in draws.",
    ),
    Column(
        "ess_per_second",
        "ESS / s",
        help="That ESS divided by the wall-clock time of the fit, warm-up included.",
    ),
    Column(
        "ess_per_gradient",
        "ESS / 1000 grad.",
        help="That ESS for 1000 gradients of the log density that the draws took, without those "
        "of the warm-up.",
    ),
    Column("divergences", "div.", help="Draws at which the integrator diverged."),
)


def divergences(samples: Samples) -> dict[str, int]:
    """The number of divergences; empty if the sampler does not count them."""
    if "diverging" not in samples.stats:
        return {}
    return {"divergences": int(samples.stats["diverging"].sum())}


def efficiency(posterior: Any, row: Mapping[str, Any]) -> dict[str, float]:
    """The median ESS per second and per 1000 gradients, as far as they are known.

    :param posterior: of ``Samples``, the statistic ``num_steps`` counts the gradients.
    :param row: its numbers, with ``ess_median`` and ``seconds``.
    """
    size, seconds = row.get("ess_median"), row.get("seconds")
    found: dict[str, float] = {}
    if size is None:
        return found
    if seconds:
        found["ess_per_second"] = size / seconds
    if isinstance(posterior, Samples) and "num_steps" in posterior.stats:
        gradients = float(posterior.stats["num_steps"].double().sum())
        if gradients > 0:
            found["ess_per_gradient"] = 1000 * size / gradients
    return found


def convergence(function: Tensor, chains: int) -> dict[str, float]:
    """R-hat and ESS of the function at the test points.

    Quantities that are constant, such as a probability that rounds to 1, are left out.

    :param function: ``(S, N, ...)``, draws of one chain after the other.
    :param chains: the number of chains.
    :returns: the numbers by column; empty for chains of fewer than 4 draws.
    """
    found: dict[str, float] = {}
    if len(function) // chains < _LEAST_DRAWS:
        return found
    by_chain = function.reshape(chains, len(function) // chains, -1)
    by_chain = by_chain[..., by_chain.flatten(0, 1).std(0) > 0]
    rhat, size, _ = diagnostics.convergence(by_chain)
    rhat, size = rhat[~rhat.isnan()], size[~size.isnan()]
    if rhat.numel():
        found["rhat"] = rhat.max().item()
    if size.numel():
        found["ess_min"], found["ess_median"] = size.min().item(), size.median().item()
    return found

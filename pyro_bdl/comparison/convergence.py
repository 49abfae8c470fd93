"""Convergence of Markov chains in function space, and its columns."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pyro_bdl import diagnostics
from pyro_bdl.diagnostics.rhat import SHARE, limit_of_rhat
from pyro_bdl.samples import Samples
from pyro_bdl.utils.tables import Column

_LEAST_DRAWS = 4

COLUMNS = (
    Column(
        "rhat",
        "R-hat",
        digits=4,
        help="R-hat of the function, not exceeded at 95 % of the test points; above its limit, "
        "1.01 for long chains, they disagree.",
    ),
    Column(
        "ess_low",
        "low ESS",
        help="Effective sample size of the function, in draws, reached at 95 % of the test points.",
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
FURTHER_COLUMNS = (
    Column(
        "rhat_limit",
        "limit of R-hat",
        digits=4,
        help="R-hat above which the chains disagree: 1.01, or for short chains what independent "
        "draws exceed once in a thousand times.",
    ),
    Column("divergent", "diverged", style="percent", help="Share of the draws that diverged."),
)


def divergences(samples: Samples) -> dict[str, float]:
    """The number of divergences and their share; empty if the sampler does not count them."""
    if "diverging" not in samples.stats:
        return {}
    diverging = samples.stats["diverging"]
    count = int(diverging.sum())
    return {"divergences": count, "divergent": count / diverging.numel()}


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
    """R-hat and ESS of the function at the test points, quantiles over them.

    Quantities that are constant, such as a probability that rounds to 1, are left out.

    :param function: ``(S, N, ...)``, draws of one chain after the other.
    :param chains: the number of chains.
    :returns: the numbers by column; NaN where they are unknown: R-hat of a single chain, and all of
        chains of fewer than 4 draws.
    """
    draws = len(function) // chains
    found = {"rhat": math.nan, "ess_low": math.nan, "ess_median": math.nan}
    found["rhat_limit"] = limit_of_rhat(chains, draws)
    by_chain = function.reshape(chains, draws, -1)
    by_chain = by_chain[..., by_chain.flatten(0, 1).std(0) > 0]
    if draws >= _LEAST_DRAWS and by_chain.shape[-1]:
        rhat, size, _ = diagnostics.convergence(by_chain)
        found["rhat"] = rhat.nanquantile(SHARE).item()
        found["ess_low"], found["ess_median"] = (
            size.nanquantile(level).item() for level in (1 - SHARE, 0.5)
        )
    return found

"""PSIS-LOO of a posterior on its training data."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_bdl import diagnostics
from pyro_bdl.comparison.held_out import Test
from pyro_bdl.comparison.k_fold import KFold
from pyro_bdl.comparison.scores import log_likelihood
from pyro_bdl.comparison.several_sites import Together
from pyro_bdl.diagnostics.loo import LOO, log_mean_exp, standard_error
from pyro_bdl.diagnostics.subsampled_loo import SubsampledLOO
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.draws import log_densities_of
from pyro_bdl.predictive.sampled import Predictive
from pyro_bdl.program.program import Program
from pyro_bdl.samples import Samples
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.progress import shown
from pyro_bdl.utils.tables import Column, listed

LeftOut = LOO | SubsampledLOO | KFold

# A posterior with fewer distinct values has no tail for the fit of a Pareto distribution.
_LEAST_VALUES = 25
EXACT, CORRECTED, PLAIN = "draws", "p / q", "plain"
# PSIS-LOO is withheld if the k-hats of more than this share of the data are too high.
_MOST_BAD = 0.05
MOST_LEFT_OUT = 2000
_AGAIN = "k_fold, or --folds of pyro-bdl compare, fits it again without a part of the data."

COLUMNS = (
    Column(
        "elpd_loo",
        "elpd",
        digits=4,
        error="elpd_loo_se",
        help="Expected log predictive density of the training data, each left out in turn, summed, "
        "in nats as the program sees them, with its standard error over the data; larger is "
        "better. Values that PSIS-LOO does not support are withheld, for the reason beside them.",
    ),
    Column(
        "high_k",
        "high k",
        help="Training data whose k-hat is too high for PSIS-LOO to be relied on.",
    ),
    Column(
        "loo_by",
        "by",
        style="text",
        help="draws: PSIS of draws of Markov chains. p / q: PSIS of draws of a guide, weighted to "
        "those of the exact posterior, which the value then is about. folds: fitted again without "
        "each part of the data. withheld, k high: PSIS fails, since single data, or the weights "
        "p / q, leave too few draws. withheld, not refitted: parameters that were fitted to all "
        "data stay as they are, such as the features of a last layer or the point of a "
        "linearization, which is too optimistic.",
    ),
)
DIFFERENCE = Column(
    "elpd_diff",
    "difference",
    error="elpd_diff_se",
    help="elpd minus the reference's, with the standard error of the difference; not of values by "
    "p / q, which are about the exact posterior.",
)
FURTHER_COLUMNS = (Column("p_loo", "p", help="Effective number of parameters by PSIS-LOO."),)


def leave_one_out(
    model: Callable,
    posterior: Any,
    samples: Samples,
    predictive: Any,
    site: str,
    parts: Sequence[Test],
    *,
    most: int = MOST_LEFT_OUT,
    progress: bool | None = None,
) -> tuple[LOO | SubsampledLOO, str] | None:
    """elpd_loo of the program under the posterior, and the kind of its draws.

    ``draws``: draws of the posterior from Markov chains. ``p / q``: draws of a guide with a
    density, weighted by the ratio of posterior and guide (Magnusson et al. 2019). ``plain``: draws
    of any other guide, treated as draws of the posterior; also draws of a Laplace approximation,
    which is the posterior of the linear model.

    :param samples: the draws.
    :param predictive: computes the log likelihood at these draws.
    :param site: the observed site.
    :param parts: the training data in batches that limit memory.
    :param most: of more data than this only so many are left out, and the sum over all of them is
        estimated; see ``diagnostics.subsampled_loo``.
    :param progress: show bars.
    :returns: None for one or a few point masses, for which PSIS-LOO is not possible, and where the
        data depend on each other through discrete sites, with a warning.
    """
    plain = predictive.predictive if isinstance(predictive, Together) else predictive
    linear = not isinstance(plain, Predictive)
    if not linear and _number_of_values(samples) < _LEAST_VALUES:
        return None
    if not isinstance(predictive, Together):  # whose densities are those of whole data
        program = Program(model, *parts[0].given())
        with torch.no_grad():
            coupled = program.run(program.initial).one_step_ahead()
        if coupled is not None:
            warnings.warn(f"{coupled}, and elpd_loo is left out", BdlWarning, stacklevel=2)
            return None
    rows, density, total, approximation = _likelihoods(predictive, site, parts, most, progress)
    draws = density.unflatten(0, (samples.num_chains if isinstance(posterior, Samples) else 1, -1))
    kind, log_q = PLAIN, None
    if isinstance(posterior, Samples):
        kind = EXACT
    elif not linear and not (isinstance(posterior, Guide) and not posterior.has_density):
        log_p, log_q = _densities(model, posterior, samples, parts[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # the table holds the number of high k-hats
        if log_q is not None:
            kind = CORRECTED
            found = diagnostics.loo_approximate_posterior(
                draws, (log_p + total)[None], log_q[None], progress=progress
            )
        else:
            efficiency = None if kind == EXACT else 1.0
            found = diagnostics.loo(draws, r_eff=efficiency, progress=progress)
    if len(rows) == len(approximation):
        return found, kind
    return diagnostics.subsampled_loo(found, approximation, rows), kind


def _left_out_rows(count: int, most: int) -> Tensor:
    """The rows that are left out: all, or at random some of many."""
    if count <= most:
        return torch.arange(count, device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(0)
    return torch.randperm(count, generator=generator, device="cpu")[:most].sort().values


def _likelihoods(
    predictive: Any, site: str, parts: Sequence[Test], most: int, progress: bool | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The numbers ``(m,)`` of the data that are left out, log p(y_n | draw) of these ``(S, m)``,
    its sum over all data ``(S,)``, and the log of its mean over the draws at all data ``(N,)``; the
    whole ``(S, N)`` is never held."""
    kept, means, start = [], [], 0
    total: Any = 0.0
    rows: Any = None
    for part in shown(parts, "leave-one-out", progress):
        found = log_likelihood(predictive, site, part)
        end = start + found.shape[1]
        if rows is None:  # a row may hold several data, or all rows may be one
            in_all = sum(other.rows for other in parts)
            rows = _left_out_rows(found.shape[1] * in_all // part.rows, most)
        inside = (rows >= start) & (rows < end)
        kept.append(found[:, (rows[inside] - start).to(found.device)])
        found = found.double()
        total = total + found.sum(1)
        means.append(log_mean_exp(found.T))
        start = end
    return rows, torch.cat(kept, 1), total, torch.cat(means)


def withheld(loo: LOO | SubsampledLOO, kind: str) -> str:
    """The reason why a value of ``leave_one_out`` must not be relied on; empty if there is none."""
    if kind == PLAIN:
        return "not refitted"
    return "k high" if loo.num_bad > _MOST_BAD * loo.pareto_k.numel() else ""


def row_of(left_out: tuple[LOO | SubsampledLOO, str] | KFold | None) -> dict[str, Any]:
    """The numbers by the keys of the columns; a withheld value is NaN."""
    if left_out is None:
        return {}
    if isinstance(left_out, KFold):
        by = f"{left_out.folds} folds"
        return {"elpd_loo": left_out.elpd, "elpd_loo_se": left_out.se, "loo_by": by}
    loo, kind = left_out
    reason = withheld(loo, kind)
    if reason:
        return {
            "elpd_loo": math.nan, "elpd_loo_se": math.nan, "p_loo": math.nan,
            "high_k": loo.num_bad, "loo_by": f"withheld, {reason}",
        }  # fmt: skip
    error = loo.se
    if isinstance(loo, SubsampledLOO):
        error, kind = loo.total_se, f"{kind}, {len(loo.rows)} of {len(loo.approximation)} data"
    return {
        "elpd_loo": loo.elpd, "elpd_loo_se": error, "p_loo": loo.p_loo, "high_k": loo.num_bad,
        "loo_by": kind,
    }  # fmt: skip


def withheld_notes(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Sentences on the posteriors whose elpd is withheld, and on what would give one."""
    by: dict[str, list[str]] = {}
    for row in rows:
        by.setdefault(str(row.get("loo_by")), []).append(row["posterior"])
    notes = []
    if names := by.get("withheld, k high"):
        notes.append(
            f"Leave-one-out of {listed(names)} is withheld, since k-hat is too high at too many of "
            "the data. Where the weights are p / q, it would be about the exact posterior at "
            "temperature 1, not about a guide that is tempered or too narrow: reweighting answers "
            f"another question. {_AGAIN}"
        )
    if names := by.get("withheld, not refitted"):
        notes.append(
            f"Leave-one-out of {listed(names)} is withheld, since what was fitted to all data "
            "(features, linearization, dropout) would stay as it is without a datum, and the value "
            f"would be too high. {_AGAIN}"
        )
    return notes


def comparable(ours: LeftOut, theirs: LeftOut) -> bool:
    """Return whether two results leave out the same data."""
    if isinstance(ours, KFold) and isinstance(theirs, KFold):
        return torch.equal(ours.fold, theirs.fold)
    if isinstance(ours, SubsampledLOO) and isinstance(theirs, SubsampledLOO):
        return torch.equal(ours.rows, theirs.rows)
    return isinstance(ours, LOO) and isinstance(theirs, LOO)


def difference(ours: LeftOut, theirs: LeftOut) -> tuple[float, float]:
    """elpd_loo minus the reference's, and its standard error, sqrt(N var of the differences).

    Of subsampled results the error of subsampling is added.

    Source: Vehtari, Gelman, Gabry (2017), eq. 24; ``arviz.compare`` divides by N, not N - 1.
    """
    gap = ours.pointwise - theirs.pointwise.to(ours.pointwise)
    if isinstance(ours, SubsampledLOO) and isinstance(theirs, SubsampledLOO):
        near = ours.approximation - theirs.approximation.to(ours.approximation)
        total, subsampling, over_data = diagnostics.difference_estimate(gap, near, ours.rows)
        return total, math.hypot(subsampling, over_data)
    return gap.sum().item(), standard_error(gap)


@torch.no_grad()
def _densities(
    model: Callable, guide: Any, samples: Samples, data: Test
) -> tuple[Tensor, Tensor | None]:
    """log p(u) and log q(u) over the unconstrained latents, ``(S,)`` each; log q is None for a
    guide without a density."""
    with evaluation_mode(model, guide):
        program = Program(model, *data.given())
        if not any(latent.plates for latent in program.latents.values()):
            few = data.part(slice(0, 2))  # the prior does not depend on the data
            program = Program(model, *few.given())
        log_p, log_q = log_densities_of(program, guide, samples, program.log_prior)
    return log_p.double(), None if log_q is None else log_q.double()


def _number_of_values(samples: Samples) -> int:
    sums = sum(value.double().reshape(len(value), -1).sum(1) for value in samples.flat().values())
    return len(torch.as_tensor(sums, device="cpu").unique())

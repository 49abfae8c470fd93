"""Predictions of data that are left out: PSIS-LOO of a posterior, and K-fold cross-validation."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from pyro_bdl import diagnostics
from pyro_bdl.comparison.columns import listed
from pyro_bdl.comparison.kind import Kind, Seen, observed
from pyro_bdl.comparison.metric import metric, metrics_of, total_error
from pyro_bdl.comparison.observe import log_densities
from pyro_bdl.comparison.setting import arguments_of
from pyro_bdl.diagnostics.loo import (
    LOO,
    Difference,
    SubsampledLOO,
    difference_estimate,
    leave_out,
    left_out_columns,
    log_mean_exp,
    standard_error,
    subsampled_loo,
    total,
)
from pyro_bdl.diagnostics.psis import smooth
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.draws import DRAWS_AT_ONCE, evenly, log_densities_of
from pyro_bdl.predictive.predictor import predictor
from pyro_bdl.program.batches import device_of_rows, has_rows, leading_size, select_rows
from pyro_bdl.program.program import Program
from pyro_bdl.program.rows import rows_of
from pyro_bdl.program.samples import Samples
from pyro_bdl.utils.jackknife import GROUPS, jackknife_error, number_of_groups, without_each
from pyro_bdl.utils.jobs import Job, processes, results_of
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.precision import double, double_device
from pyro_bdl.utils.progress import progress_bar
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.trees import equal_trees
from pyro_bdl.utils.validation import whole_number


@dataclass(frozen=True)
class KFold:
    """Result of ``k_fold``.

    :param elpd: sum over the N data of log p(y_n | the data of the other folds), in nats.
    :param se: its standard error over the data, sqrt(N var(pointwise)); over G groups of rows
        sqrt(G var(sums of pointwise over each group)).
    :param pointwise: float64 ``(N,)``, in the order of the data.
    :param fold: ``(N,)``, the fold in which each datum was held out.
    :param y: the targets of these data, by which a comparison tells other data; or None.
    :param draws_se: standard error of ``elpd`` over the draws of all folds; NaN for fewer than 20.
    :param by_groups: whether the folds are groups of rows, which may depend on each other.
    """

    elpd: float
    se: float
    pointwise: Tensor
    fold: Tensor
    y: Any = None
    draws_se: float = math.nan
    by_groups: bool = False

    @property
    def folds(self) -> int:
        """K."""
        return int(self.fold.max()) + 1

    def difference(self, other: "KFold") -> Difference:
        """How much better this posterior, or program, predicts the same folds than another.

        :raises ValueError: for other folds.
        """
        if not comparable(self, other):
            raise ValueError(
                "both must be of the same data and folds: call k_fold with equal folds and seed"
            )
        each = self.pointwise - other.pointwise.to(self.pointwise)
        error = math.hypot(self.draws_se, other.draws_se)
        return Difference(float(each.sum()), standard_error(of_units(each, self)), error)

    def __repr__(self) -> str:
        errors = f"se {self.se:.2f} over data, {self.draws_se:.2f} over draws"
        return f"elpd {self.elpd:.2f} ({errors}) of {self.folds} folds"

    def check_data(self, train: tuple) -> None:
        """Check that the folds are parts of these data.

        :raises ValueError: for another number of rows, or other targets.
        """
        rows = leading_size(train)
        own = len(self.pointwise) if self.y is None else leading_size((self.y,))
        if rows != own:
            raise ValueError(
                f"left_out holds the cross-validation of {own} rows, but train has {rows}: give "
                "k_fold the training data"
            )
        if self.y is not None and not equal_trees(self.y, train[-1]):
            raise ValueError(
                "left_out holds the cross-validation of other targets than those of train: give "
                "k_fold the training data"
            )


LeftOut = LOO | SubsampledLOO | KFold

# A posterior with fewer distinct values has no tail for the fit of a Pareto distribution.
_LEAST_VALUES = 25
EXACT, CORRECTED, NOT_REFITTED = "draws", "p / q", "not refitted"
# PSIS-LOO is withheld if the k-hats of more than this share of the data are too high.
_MOST_BAD = 0.05
MOST_LEFT_OUT = 2000
_AGAIN = "k_fold, or --folds of pyro-bdl compare, fits again without a part of the data."

# -------------------------------------------------------- metrics of ``"loo"``, result and ``by``

GROUP = "leave one out"
number = partial(metric, of="loo", group=GROUP)


@number("elpd", digits=4, error=True)
def elpd_loo(left_out: LeftOut | None, by: str) -> tuple[float, float] | None:
    """Expected log predictive density of the training data, each left out in turn, summed, in nats
    as the program sees them, with its standard error over data and draws; larger is better. Values
    that PSIS-LOO does not support are withheld, for the reason beside them."""
    if left_out is None or _withheld(left_out, by):
        return None
    over_data = left_out.total_se if isinstance(left_out, SubsampledLOO) else left_out.se
    return left_out.elpd, math.hypot(over_data, left_out.draws_se)


@number("high k")
def high_k(left_out: LeftOut | None, by: str) -> int | None:
    """Training data whose k-hat is too high for PSIS-LOO to be relied on."""
    return left_out.num_bad if isinstance(left_out, LOO | SubsampledLOO) else None


@number("by", style="text")
def loo_by(left_out: LeftOut | None, by: str) -> str:
    """draws: PSIS of draws of Markov chains. p / q: PSIS of draws of a guide, weighted to those of
    the exact posterior, which the value then is about. folds: fitted again without each part of the
    data. withheld, k high: PSIS fails, since single data, or the weights p / q, leave too few
    draws. withheld, not refitted: parameters that were fitted to all data stay as they are, such as
    the features of a last layer or the point of a linearization, which is too optimistic."""
    if isinstance(left_out, KFold):
        return f"{left_out.folds} folds"
    if reason := _withheld(left_out, by):
        return f"withheld, {reason}"
    if isinstance(left_out, SubsampledLOO):
        return f"{by}, {len(left_out.rows)} of {len(left_out.approximation)} data"
    return by


@number("p", detail=True, error=True)
def p_loo(left_out: LeftOut | None, by: str) -> tuple[float, float] | None:
    """Effective number of parameters by PSIS-LOO, with its standard error over data and draws."""
    if not isinstance(left_out, LOO | SubsampledLOO) or _withheld(left_out, by):
        return None
    return left_out.p_loo, left_out.p_loo_se


@number("difference", of="", error=True)
def elpd_diff() -> None:
    """elpd minus the reference's, with the standard error of the difference; not of values by
    p / q, which are about the exact posterior."""


LEFT_OUT = metrics_of(globals())


def _withheld(left_out: LeftOut | None, by: str) -> str:
    """Why PSIS-LOO does not support a value; empty where it does."""
    if left_out is None:
        return by
    if isinstance(left_out, KFold):
        return ""
    many = left_out.num_bad > _MOST_BAD * left_out.pareto_k.numel()
    return "k high" if many else ""


# --------------------------------------------------------------------------------- leaving out


def leave_one_out(
    model: Callable,
    kind: Kind,
    posterior: Any,
    predictive: Any,
    train: tuple,
    *,
    most: int = MOST_LEFT_OUT,
    progress: bool | None = None,
) -> tuple[LOO | SubsampledLOO | None, str]:
    """elpd_loo of the program under the posterior, and the kind of its draws.

    ``draws``: draws of the posterior from Markov chains. ``p / q``: draws of a guide with a
    density, weighted by the ratio of posterior and guide (Magnusson et al. 2019). ``not refitted``:
    any other guide, and a Laplace approximation; there is no value, since what they fitted to a
    datum (a point, features, a dropout mask's weights) stays when it is left out.

    :param kind: what the program observes.
    :param predictive: the predictions at draws of the posterior.
    :param train: the program's arguments, with the training data.
    :param most: of more data than this only so many are left out, and the sum over all of them is
        estimated; see ``diagnostics.loo.subsampled_loo``.
    :param progress: show bars.
    :returns: None and no kind for one or a few point masses, for which PSIS-LOO is not possible.
    """
    samples = predictive.samples
    if samples is None:
        return None, NOT_REFITTED
    if _number_of_values(samples) < _LEAST_VALUES:
        return None, ""
    chains = isinstance(posterior, Samples)
    if isinstance(posterior, Guide) and not posterior.has_density:
        return None, NOT_REFITTED
    log_p, log_q = (None, None) if chains else _densities(model, kind, posterior, samples, train)
    if not chains and log_q is None:
        return None, NOT_REFITTED
    seen, powers = kind.marks(model, train, posterior)
    if seen is not None and not seen.numbers.any():
        return None, ""
    parts = [
        (args, None if seen is None else seen.at(rows))
        for args, rows in kind.batches(train, samples.num_chains * samples.num_draws)
    ]
    if powers is not None and seen is not None:
        powers = powers[(seen.counts > 0).to(powers.device)]
    rows, density, of_all, approximation = _likelihoods(
        predictive, kind, parts, most, powers, progress
    )
    if log_p is not None and not kind.is_partial:
        log_p = log_p + of_all
    draws = density.unflatten(0, (samples.num_chains if chains else 1, -1))
    powers = None if powers is None else powers[rows]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # the table holds the number of high k-hats
        if log_p is None or log_q is None:
            loo: Any = total(left_out_columns(draws, powers=powers), draws)
        elif powers is None:
            loo = diagnostics.loo_approximate_posterior(draws, log_p[None], log_q[None])
        else:
            ll = double(density).T
            ratios = log_p - log_q - powers.to(ll.device)[:, None] * ll
            loo = total(leave_out(ll, ratios, 1.0), draws)
    if len(rows) < len(approximation):
        loo = subsampled_loo(loo, approximation, rows)
    return loo, EXACT if chains else CORRECTED


def _left_out_rows(count: int, most: int) -> Tensor:
    """The rows that are left out: all, or at random some of many."""
    if count <= most:
        return torch.arange(count, device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(0)
    return torch.randperm(count, generator=generator, device="cpu")[:most].sort().values


def _likelihoods(
    predictive: Any,
    kind: Kind,
    parts: Sequence[tuple[tuple, Seen | None]],
    most: int,
    powers: Tensor | None,
    progress: bool | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The numbers ``(m,)`` of the data that are left out, log p(y_n | draw) of these ``(S, m)``,
    the sum over all data ``(S,)`` of it times its power, and the log of its mean over the draws at
    all data ``(N,)``; the whole ``(S, N)`` is never held. Data that were not seen are none."""
    densities, means, start = [], [], 0
    of_all: Any = 0.0
    rows: Any = None
    for part, seen in progress_bar(parts, "leave-one-out", progress):
        density = log_densities(predictive, kind, part, seen)
        end = start + density.shape[1]
        if rows is None:  # a row may hold several data, or all rows may be one
            in_all = sum(leading_size(other) for other, _ in parts)
            count = density.shape[1] * in_all // leading_size(part)
            if seen is not None:
                count = sum(int((other.counts > 0).sum()) for _, other in parts if other)
            rows = _left_out_rows(count, most)
        inside = (rows >= start) & (rows < end)
        densities.append(density[:, (rows[inside] - start).to(density.device)])
        density = double(density)
        power: Any = 1.0 if powers is None else powers[start:end].to(density.device)
        of_all = of_all + (power * density).sum(1)
        means.append(log_mean_exp(density.T))
        start = end
    return rows, torch.cat(densities, 1), of_all, torch.cat(means)


def withheld_notes(scores: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sentences on the posteriors whose elpd is withheld, and on what would give one.

    :param scores: posterior to its numbers.
    """
    by: dict[str, list[str]] = {}
    for name, numbers in scores.items():
        by.setdefault(str(numbers.get("loo_by")), []).append(name)
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


def state_of(loo: LeftOut) -> dict[str, Any]:
    """A result as a tree for a file."""
    state = dict(vars(loo))
    if isinstance(loo, SubsampledLOO):
        state["left_out"] = vars(loo.left_out)
    return {"class": type(loo).__name__, "fields": state}


def of_state(state: Mapping[str, Any]) -> LeftOut:
    """The result of ``state_of``."""
    fields = dict(state["fields"])
    if state["class"] == "SubsampledLOO":
        fields["left_out"] = LOO(**fields["left_out"])
    return {"LOO": LOO, "SubsampledLOO": SubsampledLOO, "KFold": KFold}[state["class"]](**fields)


def elpd_difference(evaluation: Any, reference: Any) -> dict[str, float]:
    """elpd minus the reference's with its error, where both are about the posterior itself."""
    sides = evaluation, reference
    known = all("elpd_loo" in side.scores for side in sides)
    if not known or any(str(side.scores["loo_by"]).startswith(CORRECTED) for side in sides):
        return {}  # p / q is of the exact posterior
    if not comparable(evaluation.loo, reference.loo):
        return {}
    gap, error = difference(evaluation.loo, reference.loo)
    by_draws = [side for side in sides if not isinstance(side.loo, KFold)]
    if any(number_of_groups(side.effective) < GROUPS for side in by_draws):
        error = math.nan  # too few effective draws to know their error
    return {"elpd_diff": gap, "elpd_diff_se": error}


def of_units(pointwise: Tensor, of: LeftOut) -> Tensor:
    """The values over which errors are computed: of each datum, or summed over groups of them."""
    if not isinstance(of, KFold) or not of.by_groups:
        return pointwise
    fold = of.fold.to(pointwise.device).unique(return_inverse=True)[1]
    return pointwise.new_zeros(int(fold.max()) + 1).index_add_(0, fold, pointwise)


def comparable(ours: LeftOut, theirs: LeftOut) -> bool:
    """Return whether two results leave out the same data."""
    if isinstance(ours, KFold) and isinstance(theirs, KFold):
        return torch.equal(ours.fold, theirs.fold)
    if isinstance(ours, SubsampledLOO) and isinstance(theirs, SubsampledLOO):
        return torch.equal(ours.rows, theirs.rows)
    return isinstance(ours, LOO) and isinstance(theirs, LOO)


def difference(ours: LeftOut, theirs: LeftOut) -> tuple[float, float]:
    """elpd_loo minus the reference's, and its standard error.

    The error over the data, sqrt(N var of the differences), those over the draws of both and, of
    subsampled results, that of subsampling add up as squares; the sum is enlarged for few data.

    Source: Vehtari, Gelman, Gabry (2017), eq. 24; ``arviz.compare`` divides by N, not N - 1.
    """
    gap = ours.pointwise - theirs.pointwise.to(ours.pointwise)
    parts = [(side.draws_se, math.inf) for side in (ours, theirs)]  # enlarged for its groups
    if isinstance(ours, SubsampledLOO) and isinstance(theirs, SubsampledLOO):
        near = ours.approximation - theirs.approximation.to(ours.approximation)
        total, subsampling, over_data = difference_estimate(gap, near, ours.rows)
        data = [(subsampling, len(gap) - 1.0), (over_data, len(near) - 1.0)]
        return total, total_error(*data, *parts)
    units = of_units(gap, ours)
    return gap.sum().item(), total_error((standard_error(units), units.numel() - 1.0), *parts)


@torch.no_grad()
def _densities(
    model: Callable, kind: Kind, guide: Any, samples: Samples, args: tuple
) -> tuple[Tensor, Tensor | None]:
    """log p(u) and log q(u) over the unconstrained latents, ``(S,)`` each; log q is None for a
    guide without a density. Of p the prior alone, or the whole with the likelihood where other
    sites than those that are scored, or factors, are a part of it."""
    with evaluation_mode(model, guide):
        program = kind.program
        if program is None or any(latent.plates for latent in program.latents.values()):
            program = Program(model, *args)
        elif not kind.is_partial and has_rows((args, {}), leading_size(args)):
            args = select_rows(args, slice(0, 2))  # the prior does not depend on the data
        density = program.log_joint if kind.is_partial else program.log_prior
        log_p, log_q = log_densities_of(
            program, guide, samples, lambda latents: density(latents, *args)
        )
    return double(log_p), None if log_q is None else double(log_q)


def _number_of_values(samples: Samples) -> int:
    flat = [value.reshape(len(value), -1) for value in samples.flat().values()]
    most = max(1, DRAWS_AT_ONCE // max(1, sum(value.shape[1] for value in flat)))
    sums = torch.zeros(len(flat[0]), dtype=torch.float64, device=double_device(flat[0].device))
    for start in range(0, len(sums), most):  # in parts, since a sum in float64 copies its numbers
        for value in flat:
            sums[start : start + most] += double(value[start : start + most]).sum(1)
    return len(sums.cpu().unique())


# -------------------------------------------------------------------------- cross-validation


def k_fold(
    fit: Callable[..., Any],
    *data: Any,
    folds: int | ArrayLike = 10,
    num_samples: int = 1000,
    seed: int = 0,
    n_jobs: int | None = None,
    progress: bool | None = None,
) -> KFold:
    """Expected log predictive density by fitting a posterior again without each fold.

    ::

        elpd = sum_k sum_{n in fold k} log E_{q_k} p(y_n | w),   q_k fitted to the other folds

    Rows of which masks leave out all are no data: there is no value for them.

    It scores the predictions of the approximation itself, with all that is fitted to data:
    features, prior scales, linearization points. PSIS does not: it keeps what was fitted, and with
    weights p / q it scores the exact posterior. Each q_k has only (K - 1) / K of the data.

    :param fit: ``fit(*inputs, y)`` of some rows returns a program for these rows, whose
        ``num_data`` is their number, and its posterior: a guide or ``Samples``.
    :param data: the inputs and, last, the targets, or in their place a loader or a list of batches,
        which are held in memory together.
    :param folds: K, from 2 to N, for rows that are dealt at random; or ``(N,)`` labels, as the year
        or the site of each row: rows of one label are a fold, and errors are over the labels.
    :param num_samples: draws of a guide; of ``Samples`` all draws are used.
    :param seed: seed of the folds; the fit without fold k starts from ``seed + k``.
    :param n_jobs: folds at once, in processes of joblib (-1 for as many as cores), with the same
        result; by default one after another, or as ``joblib.parallel_config`` says, such as on a
        cluster of Dask. ``fit`` must then be picklable.
    :param progress: show a bar; by default in terminals and notebooks.
    :returns: ``KFold``. Two results of equal data, ``folds`` and ``seed`` have equal folds.
    :raises ValueError: if K is not between 2 and N, or for another number of labels than rows.
    :raises UnusableDrawsError: if a log likelihood is NaN.

    Source: Vehtari, Gelman, Gabry (2017), Practical Bayesian model evaluation using leave-one-out
    cross-validation and WAIC, section 2.3.
    """
    args = arguments_of("data", data, None)
    device = device_of_rows(args)
    rows = leading_size(args)
    num_samples, n_jobs = whole_number(num_samples, "num_samples"), processes(n_jobs)
    fold = _folds(folds, rows, seed)
    pointwise, variance = torch.zeros(rows, dtype=torch.float64, device=double_device(device)), 0.0
    seen = torch.ones(rows, dtype=torch.bool, device="cpu")
    jobs = (
        Job(f"fold {k}", seed + k, (fit, args, (fold == k).to(device), num_samples))
        for k in range(int(fold.max()) + 1)
    )  # independent draws, whose errors do not add up
    results = results_of(without_fold, jobs, "folds", n_jobs=n_jobs, progress=progress)
    for k, (density, over_draws, seen_rows, _) in enumerate(results):
        inside = (fold == k).to(device)
        pointwise[inside], seen[fold == k] = density.to(pointwise), seen_rows
        variance += over_draws**2
    pointwise, fold = pointwise[seen.to(device)], fold[seen]
    elpd, draws_se = float(pointwise.sum()), math.sqrt(variance)
    found = KFold(elpd, math.nan, pointwise, fold, args[-1], draws_se, np.ndim(folds) > 0)
    return replace(found, se=standard_error(of_units(pointwise, found)))


def _folds(folds: int | ArrayLike, rows: int, seed: int) -> Tensor:
    """The fold of each row, from 0 on."""
    if np.ndim(folds) == 0:
        count = whole_number(folds, "folds", least=2, most=rows)
        with seeded(seed):
            order = torch.randperm(rows, device="cpu")
        fold = torch.empty(rows, dtype=torch.int64, device="cpu")
        fold[order] = torch.arange(rows, device="cpu") % count
        return fold
    labels = np.asarray(folds.cpu() if isinstance(folds, Tensor) else folds)
    if labels.shape != (rows,):
        raise ValueError(f"folds needs a label for each of {rows} rows, got {labels.shape}")
    names, numbers = np.unique(labels, return_inverse=True)
    if len(names) < 2:
        raise ValueError(f"folds needs two labels or more, got {names[0]!r} for all rows")
    return torch.as_tensor(numbers, device="cpu")


def without_fold(
    fit: Callable[..., Any], args: tuple, held: Tensor, num_samples: int
) -> tuple[Tensor, float, Tensor, Tensor]:
    """``_log_density`` of the rows that are held back, fitted to the others."""
    train, test = (select_rows(args, mask.nonzero().flatten()) for mask in (~held, held))
    model, posterior = fit(*train)
    return _log_density(model, posterior, test, num_samples)


@torch.no_grad()
def _log_density(
    model: Callable, posterior: Any, args: tuple, num_samples: int
) -> tuple[Tensor, float, Tensor, Tensor]:
    """log E p(y_n | w) of each row, ``(N,)``, the error over the draws of its sum, whether anything
    of the row was seen, and k-hat of p(y_n | w) over the draws."""
    rows = rows_of(model, posterior)
    kind, _, seen, *_ = observed(model, args, posterior, draws=num_samples, rows=rows)
    if not kind.by_rows or kind.is_joint:
        raise ValueError(
            f"k_fold leaves out rows, and the observed sites {', '.join(map(repr, kind.sites))} "
            "have no common plate with a cell for each row"
        )
    count = evenly(posterior, num_samples)
    predictive = predictor(model, posterior, count, unknown=kind.unknown)
    parts, tails = [], []
    without: Any = torch.full((GROUPS,), math.nan, device="cpu")
    for part, _ in kind.batches(args, num_samples):
        density = double(log_densities(predictive, kind, part))
        of_rows = density.reshape(len(density), leading_size(part), -1).sum(-1)
        parts.append(log_mean_exp(of_rows.T))
        tails.append(smooth(of_rows.T, 1.0)[1])
        if groups := number_of_groups(len(of_rows)):
            sums = [log_mean_exp(some.T).sum() for some in without_each(of_rows, groups)]
            without = torch.stack(sums) + (without.to(sums[0]) if len(parts) > 1 else 0.0)
    every = torch.ones(leading_size(args), dtype=torch.bool, device="cpu")
    seen_rows = every if seen is None else seen.of_rows().cpu()
    return torch.cat(parts), float(jackknife_error(without)), seen_rows, torch.cat(tails)

"""Leave-one-out cross-validation by Pareto smoothed importance sampling, also from a part of the
data."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_bdl.diagnostics.blocks import check_draws, map_blocks, split_chains
from pyro_bdl.diagnostics.ess import ess_of_chains
from pyro_bdl.diagnostics.psis import check_efficiency, good_k, smooth, tail_size
from pyro_bdl.errors import warn
from pyro_bdl.utils.jackknife import ERRORS, enlarged, jackknife_error, number_of_groups
from pyro_bdl.utils.precision import double, double_device


class Difference(NamedTuple):
    """``LOO.difference`` and ``KFold.difference``.

    :param elpd: the difference of the sums over the N data, in nats.
    :param se: its standard error over the data, sqrt(N var) of the paired differences.
    :param draws_se: over the draws of both, which are independent.
    """

    elpd: float
    se: float
    draws_se: float

    def __repr__(self) -> str:
        return f"{self.elpd:+.1f} nats (se {self.se:.1f} over data, {self.draws_se:.1f} over draws)"


@dataclass(frozen=True)
class LOO:
    """Expected log predictive density for new data, estimated by leaving out each observation.

    :param elpd: sum over the N observations of log p(y_n | the others), in nats.
    :param se: standard error of ``elpd`` over observations, sqrt(N var(pointwise)).
    :param p_loo: effective number of parameters, log p(y_n | all) - log p(y_n | the others) summed.
    :param pointwise: float64, log p(y_n | the others), of the observations' shape.
    :param pareto_k: float64, k-hat of each observation; above ``good_k`` its value is not reliable.
    :param good_k: min(1 - 1 / log10(S), 0.7).
    :param num_draws: S, of all chains.
    :param draws_se: standard error of ``elpd`` over the draws, so that two of them are a 95 %
        interval: by leaving out one group of ten after the other, at fixed weights, enlarged for
        so few groups, with the bias of smoothing (``leave_out``), by which ``elpd`` is too high
        where data are few for the latents; NaN for fewer than 20 draws.
    :param pit: of numbers, by ``bdl.loo``: the probability integral transform of each observation
        among predictions without it, by the weights of PSIS; uniform if the predictions are right.
    :param p_loo_se: standard error of ``p_loo``, over observations and draws.
    """

    elpd: float
    se: float
    p_loo: float
    pointwise: Tensor
    pareto_k: Tensor
    good_k: float
    num_draws: int
    draws_se: float = math.nan
    pit: Tensor | None = None
    p_loo_se: float = math.nan

    @property
    def num_bad(self) -> int:
        """The number of observations that have a k-hat above ``good_k``."""
        return int((self.pareto_k > self.good_k).sum())

    def difference(self, other: "LOO") -> "Difference":
        """How much better this posterior, or program, predicts the same data than another.

        Differences below 4 nats, and those of fewer than 100 data, are hardly known better than
        their sign, and their error is too small where a program fits badly (Sivula et al. 2020).

        :raises ValueError: for other data, in number or shape.
        """
        if self.pointwise.shape != other.pointwise.shape:
            raise ValueError(
                f"both must be of the same data, got {tuple(self.pointwise.shape)} and "
                f"{tuple(other.pointwise.shape)} of them"
            )
        each = self.pointwise - other.pointwise.to(self.pointwise.device)
        error = math.hypot(self.draws_se, other.draws_se)
        return Difference(float(each.sum()), standard_error(each), error)

    def __repr__(self) -> str:
        errors = f"se {self.se:.2f} over data, {self.draws_se:.2f} over draws"
        return (
            f"elpd_loo {self.elpd:.2f} ({errors}), "
            f"p_loo {self.p_loo:.2f} (se {self.p_loo_se:.2f}); "
            f"{self.pointwise.numel()} observations, {self.num_draws} draws; "
            f"k-hat above {self.good_k:.2f}: {self.num_bad}"
        )


def loo(log_likelihood: Tensor, *, r_eff: float | None = 1.0) -> LOO:
    """PSIS-LOO: predictive density of each observation given the others, without refitting.

    With draws w_s from the posterior, the ratios 1 / p(y_n | w_s) smoothed to weights v_ns::

        elpd = sum_n log sum_s v_ns p(y_n | w_s)

    :param log_likelihood: log p(y_n | w_s), ``(chains, draws, ...)``, in nats and unscaled, as
        ``Predictive.log_likelihood`` gives it: ``.reshape(chains, draws, -1)``.
    :param r_eff: effective sample size of the draws over their number, which determines the length
        of the tails; None for that of each observation's likelihood along the chains,
        ``ess(log_likelihood.exp(), kind="mean") / S``, as ``relative_eff`` of R's loo.
    :returns: ``LOO``. If an observation's log likelihood is constant, its value is that constant,
        and its k-hat is NaN, since there is no tail. If it holds NaN, both are NaN.
    :raises TypeError: if ``log_likelihood`` is not a real tensor.
    :raises ValueError: for an ``r_eff`` that is not positive, fewer than two axes or 4 draws a
        chain.
    :warns BdlWarning: if a k-hat lies above ``good_k``.

    Source: Vehtari, Gelman, Gabry (2017), Practical Bayesian model evaluation using leave-one-out
    cross-validation and WAIC; Vehtari et al. (2024), Pareto smoothed importance sampling. Equal to
    ``arviz.loo`` of 1.x.
    """
    return total(left_out_columns(log_likelihood, r_eff), log_likelihood)


def left_out_columns(
    log_likelihood: Tensor, r_eff: float | None = 1.0, powers: Tensor | None = None
) -> Tensor:
    """The columns of ``leave_out`` of all observations, ``(4 + 2 G, ...)``, from the arguments of
    ``loo``.

    :param powers: of the likelihoods in the density of the posterior, ``(N,)``, for ``(chains,
        draws, N)``; 1 by default.
    """
    if r_eff is not None:
        check_efficiency(r_eff)
    if powers is not None:
        ll = double(log_likelihood.flatten(0, 1)).T
        return leave_out(ll, -powers.to(ll.device)[:, None] * ll, 1.0)

    def statistic(x: Tensor) -> Tensor:
        ll = x.flatten(1)
        if r_eff is not None:
            return leave_out(ll, -ll, r_eff)
        found = ll.new_empty(4 + 2 * number_of_groups(ll.shape[1]), len(ll))
        likelihood = (x - x.amax((1, 2), keepdim=True)).exp()
        ratios = ess_of_chains(split_chains(likelihood)).nan_to_num(ll.shape[1]) / ll.shape[1]
        sizes = [tail_size(ll.shape[1], ratio) for ratio in ratios.tolist()]
        for size in set(sizes):  # observations with tails of one length together
            rows = [place for place, other in enumerate(sizes) if other == size]
            found[:, rows] = leave_out(ll[rows], -ll[rows], float(ratios[rows[0]]))
        return found

    return map_blocks(statistic, log_likelihood)


def loo_approximate_posterior(log_likelihood: Tensor, log_p: Tensor, log_q: Tensor) -> LOO:
    """PSIS-LOO from draws of an approximation, such as a guide.

    Like ``loo``, but with the ratios p(w_s) / (q(w_s) p(y_n | w_s)), where p is the joint density.
    They correct for the approximation and leave out y_n in one step. A large k-hat at all
    observations means that the guide is far from the posterior.

    :param log_likelihood: ``(chains, draws, ...)``, in nats, at draws from q; a guide's draws are
        one chain.
    :param log_p: log joint density of the model at the draws, ``(chains, draws)``, up to a
        constant.
    :param log_q: log density of the approximation at the draws, ``(chains, draws)``.
    :returns: ``LOO``.
    :raises TypeError: if one of the three is not a real tensor.
    :raises ValueError: if their chains and draws differ; for fewer than two axes or 4 draws a
        chain.
    :warns BdlWarning: if a k-hat lies above ``good_k``.

    Source: Magnusson, Andersen, Jonasson, Vehtari (2019), Bayesian leave-one-out cross-validation
    for large data, equation 8. Equal to ``arviz.loo_approximate_posterior`` of 1.x.
    """
    check_draws(log_likelihood, "log_likelihood")
    for name, value in (("log_p", log_p), ("log_q", log_q)):
        check_draws(value, name)
        if value.shape != log_likelihood.shape[:2]:
            raise ValueError(
                f"{name} must have the (chains, draws) of log_likelihood, "
                f"{tuple(log_likelihood.shape[:2])}, but has shape {tuple(value.shape)}"
            )
    device = double_device(log_likelihood.device)
    correction = (double(log_p.detach()) - double(log_q.detach())).to(device).flatten()
    correction = correction - correction.amax()

    def statistic(x: Tensor) -> Tensor:
        ll = x.flatten(1)
        return leave_out(ll, correction - ll, 1.0)

    return total(map_blocks(statistic, log_likelihood), log_likelihood)


def log_mean_exp(x: Tensor) -> Tensor:
    """log of the mean of exp(x) over the last axis."""
    return x.logsumexp(-1) - math.log(x.shape[-1])


def standard_error(pointwise: Tensor) -> float:
    """sqrt(N var(pointwise)), the standard error of the sum of N values; NaN for a single one."""
    n = pointwise.numel()
    return math.sqrt(n * pointwise.var().item()) if n > 1 else math.nan


def leave_out(ll: Tensor, log_ratios: Tensor, r_eff: float, of_all: Tensor | float = 0.0) -> Tensor:
    """Each observation's log density without it, its log density with all data, k-hat, the bias of
    the first, and the first two without each group of draws: ``(4 + 2 G, block)``.

    The bias is what the weights lack of the fitted tail (:func:`smooth`), a share d of their sum at
    the likelihood p of the largest ratio: log(1 + d) - log(1 + d p / sum v p).

    :param of_all: log weights of the draws for the posterior with all data, as ``ll``.
    """
    log_weights, k, lacking = smooth(log_ratios, r_eff)
    weighted = log_weights + ll
    of_all = torch.zeros_like(ll) + of_all
    without, with_all = weighted.logsumexp(-1), (ll + of_all).logsumexp(-1) - of_all.logsumexp(-1)
    farthest = ll.gather(-1, log_ratios.argmax(-1, keepdim=True))[..., 0]
    bias = lacking.log1p() - (lacking * (farthest - without).exp()).log1p()
    rows = [without, with_all, k, bias]
    groups = number_of_groups(ll.shape[-1])
    for pair in ((weighted, log_weights), (ll + of_all, of_all)) if groups else ():
        sums = [
            torch.stack([part.logsumexp(-1) for part in values.tensor_split(groups, -1)])
            for values in pair
        ]
        for g in range(groups):
            others = [h for h in range(groups) if h != g]
            rows.append(sums[0][others].logsumexp(0) - sums[1][others].logsumexp(0))
    return torch.stack(rows)


def total(
    found: Tensor, log_likelihood: Tensor, other_error: float = 0.0, pit: Tensor | None = None
) -> LOO:
    """The result of the columns of ``leave_out``, ``(4 + 2 G, *data)``.

    :param other_error: a standard error over draws that the columns do not hold, in nats.
    :param pit: of leave-one-out.
    """
    left_out, with_all, k = found[:3]
    bias, *groups = (
        found[3:]
        .reshape(len(found) - 3, k.numel())
        .sum(1)
        .split([1, (len(found) - 4) // 2, (len(found) - 4) // 2])
    )

    def over_draws(without: Tensor) -> float:
        """The error of a sum over all observations from those without each group of draws."""
        if not len(without):
            return math.nan
        error = float(jackknife_error(without) * enlarged(ERRORS, (1.0, len(without) - 1)))
        return math.hypot(error, float(bias), other_error)

    num_draws = log_likelihood.shape[0] * log_likelihood.shape[1]
    result = LOO(
        elpd=left_out.sum().item(),
        se=standard_error(left_out),
        p_loo=(with_all - left_out).sum().item(),
        pointwise=left_out,
        pareto_k=k,
        good_k=good_k(num_draws),
        num_draws=num_draws,
        draws_se=over_draws(groups[0]),
        pit=pit,
        p_loo_se=math.hypot(standard_error(with_all - left_out), over_draws(groups[1] - groups[0])),
    )
    if result.num_bad:
        warn(
            f"k-hat of {result.num_bad} of {k.numel()} observations lies above "
            f"{result.good_k:.2f}, where LOO is not reliable: these observations influence "
            f"the posterior strongly, or there are too few draws",
            "k-hat",
        )
    return result


# --------------------------------------------------------------- from a part of the data


@dataclass(frozen=True)
class SubsampledLOO:
    """elpd_loo of N observations, of which m were left out.

    :param elpd: the estimate of the sum over all N, in nats.
    :param se: standard error of ``elpd`` over observations, sqrt(N var(pointwise)), estimated.
    :param subsampling_se: standard error from leaving out m observations only; 0 for m = N.
    :param p_loo: effective number of parameters, the sum of log p(y_n | all) minus ``elpd``.
    :param left_out: PSIS-LOO of the m observations.
    :param approximation: float64 ``(N,)``, log p(y_n | all data).
    :param rows: ``(m,)``, the places of the m observations among the N.
    """

    elpd: float
    se: float
    subsampling_se: float
    p_loo: float
    left_out: LOO
    approximation: Tensor
    rows: Tensor

    @property
    def p_loo_se(self) -> float:
        """Standard error of ``p_loo``: N / m times that of the m observations."""
        return self.left_out.p_loo_se * len(self.approximation) / len(self.rows)

    @property
    def pointwise(self) -> Tensor:
        """log p(y_n | the others) of the m observations."""
        return self.left_out.pointwise

    @property
    def pareto_k(self) -> Tensor:
        """k-hat of the m observations."""
        return self.left_out.pareto_k

    @property
    def num_bad(self) -> int:
        """How many of the m observations have a k-hat above ``good_k``."""
        return self.left_out.num_bad

    @property
    def total_se(self) -> float:
        """The standard errors over observations and by subsampling together."""
        return math.hypot(self.se, self.subsampling_se)

    @property
    def draws_se(self) -> float:
        """Standard error of ``elpd`` over the draws: N / m times that of the m observations."""
        return self.left_out.draws_se * len(self.approximation) / len(self.rows)

    def __repr__(self) -> str:
        errors = (
            f"se {self.se:.2f} over data, {self.subsampling_se:.2f} by subsampling, "
            f"{self.draws_se:.2f} over draws"
        )
        return (
            f"elpd_loo {self.elpd:.2f} ({errors}), "
            f"p_loo {self.p_loo:.2f} (se {self.p_loo_se:.2f}); "
            f"{len(self.rows)} of {len(self.approximation)} observations; "
            f"k-hat above {self.left_out.good_k:.2f}: {self.num_bad}"
        )


def subsampled_loo(left_out: LOO, approximation: Tensor, rows: Tensor) -> SubsampledLOO:
    """elpd_loo of all observations from some, drawn at random without replacement.

    log p(y_n | all data), which needs no smoothing, is known of all observations and corrected by
    what leaving out changes in the sample; see :func:`difference_estimate`.

    :param left_out: PSIS-LOO of m observations.
    :param approximation: ``(N,)``, log p(y_n | all data) of all observations.
    :param rows: ``(m,)``, places of the m observations among the N.
    """
    approximation = double(approximation.detach())
    elpd, subsampling, over_data = difference_estimate(left_out.pointwise, approximation, rows)
    return SubsampledLOO(
        elpd=elpd,
        se=over_data,
        subsampling_se=subsampling,
        p_loo=float(approximation.sum()) - elpd,
        left_out=left_out,
        approximation=approximation,
        rows=rows,
    )


def difference_estimate(
    values: Tensor, approximation: Tensor, rows: Tensor
) -> tuple[float, float, float]:
    """The sum of N values of which m are known, all of them being known approximately.

    With values v, approximations a, and e_j = v_j - a_j in the sample S::

        T = sum_n a_n + N / m sum_{j in S} e_j
        var(T) = N^2 (1 - m / N) var_S(e) / m

    Both are unbiased. The variance of the values over all data is estimated likewise, from
    v^2 - a^2 and T^2 - var(T).

    :param values: ``(m,)``, v in the sample.
    :param approximation: ``(N,)``, a.
    :param rows: ``(m,)``, the sample, drawn without replacement.
    :returns: T, its standard error from sampling, and sqrt(N var(v)), the standard error over data.

    Source: Magnusson, Vehtari, Jonasson, Andersen (2020), Leave-one-out cross-validation for
    Bayesian model comparison in large data, eqs. 7 to 9.
    """
    v, a = double(values).flatten(), double(approximation).flatten()
    near = a[rows.to(a.device)]
    n, m = len(a), len(v)
    total = a.sum() + n * (v - near).mean()
    variance = torch.zeros_like(total)
    if m > 1:
        variance = n**2 * (1 - m / n) * (v - near).var() / m
    squares = a.square().sum() + n * (v.square() - near.square()).mean()
    spread = (squares - (total.square() - variance) / n).clamp_min(0)  # the sum of squares
    over_data = (n * spread / max(1, n - 1)).sqrt()
    return float(total), float(variance.sqrt()), float(over_data)

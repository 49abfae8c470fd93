"""Effective sample size."""

import math
from collections.abc import Sequence

import torch
from scipy.fft import next_fast_len
from torch import Tensor

from pyro_bdl.diagnostics.blocks import check_draws, map_blocks, split_chains
from pyro_bdl.diagnostics.rank import normal_scores, ordered, quantile_of_sorted, sort
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.validation import one_of

# The fixed quantile levels of each kind; other kinds take them from ``prob``.
_LEVELS: dict[str, tuple[float, ...] | None] = {
    "bulk": (),
    "tail": None,
    "mean": (),
    "sd": (),
    "median": (0.5,),
    "quantile": None,
    "local": None,
}
_COUNT = {"tail": 2, "quantile": 1, "local": 2}


def ess(
    draws: Tensor,
    *,
    kind: str = "bulk",
    prob: float | Sequence[float] | None = None,
) -> Tensor:
    """Effective sample size: the number of independent draws with the same Monte Carlo error.

    For M chains of n draws, rho_t the autocorrelation at lag t over all chains::

        ESS = M n / tau,    tau = -1 + 2 sum_k P_k,    P_k = rho_2k + rho_2k+1

    The sum ends before the first P_k <= 0, and each P_k is replaced by the smallest of P_0 ... P_k
    (Geyer's initial monotone sequence). tau is at least 1 / log10(M n).

    :param draws: ``(chains, draws, ...)``, any real dtype and device.
    :param kind: the function of the draws x whose ESS is computed, from half chains:

        - ``"bulk"``: the normal scores of their ranks;
        - ``"mean"``: x; ``"sd"``: (x - mean)^2;
        - ``"quantile"``: whether x is at most its quantile at ``prob``; ``"median"``: at 0.5;
        - ``"tail"``: the smaller ESS of two quantiles, by default 5 % and 95 %;
        - ``"local"``: whether x lies between the two quantiles ``prob``.
    :param prob: the level of ``"quantile"``, the two levels of ``"local"`` and ``"tail"``.
    :returns: float64 ``(...)``, in draws; for a constant the number of draws, NaN if the draws hold
        NaN.
    :raises TypeError: if ``draws`` is not a real tensor.
    :raises ValueError: for an unknown ``kind``; a ``prob`` that does not fit the kind; fewer than
        two axes or 4 draws a chain.

    Source: Vehtari et al. (2021), Rank-normalization, folding, and localization, section 3 and
    4.3; Geyer (1992), Practical Markov chain Monte Carlo. Equal to ``arviz.ess`` of 1.x.
    """
    levels = _levels(kind, prob)

    def statistic(x: Tensor) -> Tensor:
        return torch.where(has_nan(x), torch.nan, _ess_of_kind(x, kind, levels))

    return map_blocks(statistic, draws)


def within_ess(draws: Tensor, *, kind: str = "bulk") -> Tensor:
    """Effective sample size of each chain on its own.

    For chains that stay in separate modes, as for ``within_rhat``. The average of M such chains of
    equal variance has ``M^2 / sum_m 1 / ESS_m`` effective draws, at most the sum of the ESS_m.

    :param draws: ``(chains, draws, ...)``.
    :param kind: as of ``ess``, other than those with a level.
    :returns: float64 ``(chains, ...)``; the number of draws for a chain that stands still, as in
        ArviZ.
    """
    check_draws(draws)
    return torch.stack([ess(chain[None], kind=kind) for chain in draws])


def _ess_of_kind(x: Tensor, kind: str, levels: Sequence[float]) -> Tensor:
    if kind == "mean":
        return ess_of_chains(split_chains(x))
    if kind == "sd":
        return ess_of_chains(split_chains(squared_deviations(x)))
    if kind == "bulk":
        halves = split_chains(x)
        return ess_of_chains(normal_scores(ordered(halves.flatten(1))).view_as(halves))
    in_order = sort(x.flatten(1))
    limits = [quantile_of_sorted(in_order, level) for level in levels]
    if kind == "local":
        low, high = (limit[:, None, None] for limit in limits)
        return ess_of_event((low <= x) & (x <= high))
    return ess_below(x, limits)


def ess_below(x: Tensor, limits: Sequence[Tensor]) -> Tensor:
    """The smallest ESS of the events x <= limit, over all limits.

    :param x: ``(block, chains, draws)``.
    :param limits: each ``(block,)``.
    """
    values = [ess_of_event(x <= limit[:, None, None]) for limit in limits]
    return torch.stack(values).amin(0)


def ess_of_event(happened: Tensor) -> Tensor:
    """ESS of the frequency of an event.

    :param happened: bool, whether the event happened at each draw.
    """
    return ess_of_chains(split_chains(double(happened)))


def squared_deviations(x: Tensor) -> Tensor:
    """(x - mean)^2, the mean over all draws of all chains."""
    return (x - x.mean((-2, -1), keepdim=True)).square()


def has_nan(x: Tensor) -> Tensor:
    """Return which quantities of ``(block, chains, draws)`` hold a NaN, (block,)."""
    return x.flatten(1).amax(-1).isnan()


def mean_autocovariance(x: Tensor) -> Tensor:
    """Autocovariance at lags 0 to n - 1, divided by n, averaged over the chains.

    ``(block, chains, n)`` to ``(block, n)``. The power spectra are averaged over chains, so that
    one inverse transform is enough.
    """
    n = x.shape[-1]
    padded = next_fast_len(2 * n, real=True)
    spectrum = torch.fft.rfft(x - x.mean(-1, keepdim=True), n=padded)
    squares = torch.view_as_real(spectrum).square().flatten(-2).mean(-2)
    power = squares[:, ::2] + squares[:, 1::2]
    return torch.fft.irfft(power.to(spectrum.dtype), n=padded)[..., :n] / n


def ess_of_chains(x: Tensor) -> Tensor:
    """Effective sample size of chains, without splitting them.

    :param x: float64 ``(block, chains, n)``, at least two chains.
    :returns: float64 ``(block,)``; the number of draws for a constant.
    """
    chains, n = x.shape[-2:]
    size = chains * n
    last_pair = max((n - 3) // 2, 0)
    covariance = mean_autocovariance(x)[:, : 2 * last_pair + 2]
    within = covariance[:, :1] * n / (n - 1)
    total = covariance[:, :1] + x.mean(-1).var(-1, keepdim=True)
    rho = 1 - (within - covariance) / total
    rho[:, 0] = 1

    pairs = rho[:, ::2] + rho[:, 1::2]
    ends = pairs <= 0
    stop = torch.where(ends.any(1), ends.int().argmax(1), last_pair)
    summed = torch.arange(last_pair + 1, device=x.device) < stop[:, None]
    monotone = torch.where(summed, pairs.cummin(1).values, 0).sum(1)
    # Half of the next pair is added, which helps antithetic chains (Vehtari et al., section 3.2).
    even = rho.gather(1, 2 * stop[:, None]).squeeze(1)
    at_stop = pairs.gather(1, stop[:, None]).squeeze(1)
    half_pair = torch.where((at_stop >= 0) | (even > 0), even, 0)

    tau = (-1 + 2 * monotone + half_pair).clamp_min(1 / math.log10(size))
    value = torch.where(rho[:, 1].isnan(), torch.nan, size / tau)
    spread = x.amax((-2, -1)) - x.amin((-2, -1))
    return torch.where(spread < 1e-15, float(size), value)


def _levels(kind: str, prob: float | Sequence[float] | None) -> tuple[float, ...]:
    """The quantiles that a kind needs."""
    one_of(kind, "kind", _LEVELS)
    fixed = _LEVELS[kind]
    if fixed is not None:
        if prob is not None:
            raise ValueError(f"kind={kind!r} takes no prob, got {prob}")
        return fixed
    if kind == "tail" and prob is None:
        return 0.05, 0.95
    given = (prob,) if isinstance(prob, int | float) else tuple(prob or ())
    if kind == "tail" and len(given) == 1:
        given = (given[0], 1 - given[0])
    if len(given) != _COUNT[kind] or not all(0 <= level <= 1 for level in given):
        need = "a level" if _COUNT[kind] == 1 else "two levels"
        raise ValueError(f"kind={kind!r} needs {need} between 0 and 1 as prob, got {prob}")
    return given

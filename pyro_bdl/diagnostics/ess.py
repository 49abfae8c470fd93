"""Effective sample size."""

import math

import torch
from scipy.fft import next_fast_len
from torch import Tensor

from pyro_bdl.diagnostics.blocks import map_blocks, split_chains
from pyro_bdl.diagnostics.rank import normal_scores, quantile_of_sorted, sort


def ess(draws: Tensor, *, kind: str = "bulk") -> Tensor:
    """How many independent draws would tell as much about each quantity.

    For M chains of n draws, rho_t the autocorrelation at lag t over all chains::

        ESS = M n / tau,    tau = -1 + 2 sum_k P_k,    P_k = rho_2k + rho_2k+1

    The sum ends before the first P_k <= 0 and the P_k are made non-increasing (Geyer's initial
    monotone sequence); tau is at least 1 / log10(M n).

    :param draws: ``(chains, draws, ...)``, any real dtype and device.
    :param kind: ``"bulk"``: of the rank-normalised split chains; ``"tail"``: the smaller one for
        the 5 % and the 95 % quantile; ``"mean"``: of the split chains as they are.
    :returns: float64 ``(...)``, in draws. The number of draws for a constant, NaN where there is a
        NaN.
    :raises TypeError: where ``draws`` is no real tensor.
    :raises ValueError: for an unknown ``kind``; fewer than two axes or 4 draws a chain.

    Source: Vehtari et al. (2021), Rank-normalization, folding, and localization, section 3 and
    4.3; Geyer (1992), Practical Markov chain Monte Carlo. Equal to ``arviz.ess`` 0.23.
    """
    if kind not in _KINDS:
        raise ValueError(f"kind={kind!r} is unknown; choose one of {', '.join(map(repr, _KINDS))}")
    return map_blocks(_KINDS[kind], draws)


def _bulk(x: Tensor) -> Tensor:
    halves = split_chains(x)
    scores = normal_scores(halves.flatten(1)).view_as(halves)
    return _or_nan(x, ess_of_chains(scores))


def _tail(x: Tensor) -> Tensor:
    ordered = sort(x.flatten(1))
    low, high = (
        ess_of_chains(split_chains((x <= limit[:, None, None]).to(x.dtype)))
        for limit in (quantile_of_sorted(ordered, 0.05), quantile_of_sorted(ordered, 0.95))
    )
    return _or_nan(x, torch.minimum(low, high))


def _mean(x: Tensor) -> Tensor:
    return _or_nan(x, ess_of_chains(split_chains(x)))


_KINDS = {"bulk": _bulk, "tail": _tail, "mean": _mean}


def _or_nan(x: Tensor, value: Tensor) -> Tensor:
    return torch.where(x.isnan().flatten(1).any(-1), torch.nan, value)


def mean_autocovariance(x: Tensor) -> Tensor:
    """Autocovariance at lags 0 to n - 1, divided by n, averaged over the chains.

    ``(block, chains, n)`` to ``(block, n)``. The power spectra are averaged, so that one inverse
    transform serves all chains.
    """
    n = x.shape[-1]
    padded = next_fast_len(2 * n, real=True)
    spectrum = torch.fft.rfft(x - x.mean(-1, keepdim=True), n=padded)
    power = torch.view_as_real(spectrum).square().sum(-1).mean(-2)
    return torch.fft.irfft(power.to(spectrum.dtype), n=padded)[..., :n] / n


def ess_of_chains(x: Tensor) -> Tensor:
    """Effective sample size of chains as they are.

    :param x: float64 ``(block, chains, n)``, at least two chains.
    :returns: float64 ``(block,)``; the number of draws for a constant.
    """
    chains, n = x.shape[-2:]
    size = chains * n
    covariance = mean_autocovariance(x)
    within = covariance[:, :1] * n / (n - 1)
    total = covariance[:, :1] + x.mean(-1).var(-1, keepdim=True)
    rho = 1 - (within - covariance) / total
    rho[:, 0] = 1

    last_pair = max((n - 3) // 2, 0)
    pairs = rho[:, : 2 * last_pair + 2].unflatten(1, (-1, 2)).sum(-1)
    ends = pairs <= 0
    stop = torch.where(ends.any(1), ends.int().argmax(1), last_pair)
    summed = torch.arange(last_pair + 1, device=x.device) < stop[:, None]
    monotone = torch.where(summed, pairs.cummin(1).values, 0).sum(1)
    # Half a pair beyond the sum, which helps antithetic chains (Vehtari et al., section 3.2).
    even = rho.gather(1, 2 * stop[:, None]).squeeze(1)
    at_stop = pairs.gather(1, stop[:, None]).squeeze(1)
    half_pair = torch.where((at_stop >= 0) | (even > 0), even, 0)

    tau = (-1 + 2 * monotone + half_pair).clamp_min(1 / math.log10(size))
    value = torch.where(rho[:, 1].isnan(), torch.nan, size / tau)
    spread = x.amax((-2, -1)) - x.amin((-2, -1))
    return torch.where(spread < 1e-15, float(size), value)

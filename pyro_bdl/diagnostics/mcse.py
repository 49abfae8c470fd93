"""Monte Carlo standard error."""

import numpy as np
import torch
from scipy.special import betaincinv
from torch import Tensor

from pyro_bdl.diagnostics.blocks import map_blocks, split_chains
from pyro_bdl.diagnostics.ess import ess_below, ess_of_chains, has_nan, squared_deviations
from pyro_bdl.diagnostics.rank import quantile_of_sorted, sort
from pyro_bdl.utils.validation import one_of, real_number

_KINDS = ("mean", "sd", "median", "quantile")
_ONE_SIGMA = (0.1586553, 0.8413447)  # Phi(-1) and Phi(1), with ArviZ's digits


def mcse(
    draws: Tensor,
    *,
    kind: str = "mean",
    prob: float | None = None,
) -> Tensor:
    """Monte Carlo standard error of an estimate from the draws of Markov chains.

    ::

        mean       sd(x) / sqrt(ESS_mean)
        sd         sqrt((E[d^4] - E[d^2]^2) / (4 E[d^2] ESS_sd)),    d = x - E[x]
        quantile   (x_(b) - x_(a)) / 2, a and b the 16 % and 84 % quantiles of
                   Beta(ESS p + 1, ESS (1 - p) + 1), with the ESS of the event x <= quantile

    :param draws: ``(chains, draws, ...)``, any real dtype and device.
    :param kind: ``"mean"``, ``"sd"``, ``"median"``, or ``"quantile"`` at the level ``prob``.
    :param prob: between 0 and 1, for ``"quantile"`` only.
    :returns: float64 ``(...)``, in the units of the draws; NaN if the draws hold NaN. For a
        constant 0, but NaN for ``"sd"``.
    :raises TypeError: if ``draws`` is not a real tensor.
    :raises ValueError: for an unknown ``kind``; a ``prob`` that does not fit the kind; fewer than
        two axes or 4 draws a chain.

    Source: Vehtari et al. (2021), Rank-normalization, folding, and localization, sections 3 and
    4.4; for the sd, the delta method on the variance. Equal to ``arviz.mcse`` of 1.x.
    """
    one_of(kind, "kind", _KINDS)
    if prob is not None:
        real_number(prob, "prob", "[0, 1]")
    if (prob is not None) != (kind == "quantile"):
        need = "a level between 0 and 1 as" if kind == "quantile" else "no"
        raise ValueError(f"kind={kind!r} takes {need} prob, got {prob}")
    level = 0.5 if prob is None else prob

    def statistic(x: Tensor) -> Tensor:
        if kind == "mean":
            value = mcse_of_mean(x)
        elif kind == "sd":
            value = mcse_of_sd(x)
        else:
            value = mcse_of_quantile(x, level)
        return torch.where(has_nan(x), torch.nan, value)

    return map_blocks(statistic, draws)


def mcse_of_mean(x: Tensor) -> Tensor:
    """MCSE of the mean, from ``(block, chains, draws)`` to ``(block,)``."""
    return x.flatten(1).std(-1) / ess_of_chains(split_chains(x)).sqrt()


def mcse_of_sd(x: Tensor) -> Tensor:
    """MCSE of the sd, from ``(block, chains, draws)`` to ``(block,)``."""
    squares = squared_deviations(x)
    variance = squares.mean((-2, -1))
    of_variance = squares.square().mean((-2, -1)) - variance.square()
    return (of_variance / ess_of_chains(split_chains(squares)) / variance / 4).sqrt()


def mcse_of_quantile(x: Tensor, level: float) -> Tensor:
    """MCSE of a quantile, from ``(block, chains, draws)`` to ``(block,)``.

    The Beta quantiles are computed by scipy on the CPU.
    """
    in_order = sort(x.flatten(1))
    limit = quantile_of_sorted(in_order, level)
    size = ess_below(x, [limit]).cpu().numpy()[:, None]
    with np.errstate(invalid="ignore"):
        quantiles = betaincinv(size * level + 1, size * (1 - level) + 1, _ONE_SIGMA)
    last = in_order.shape[-1] - 1
    place = torch.from_numpy(quantiles * (last + 1) - 1)
    low = place[:, 0].nan_to_num(0).clamp_min(0).floor()
    high = place[:, 1].nan_to_num(last).clamp_max(last).ceil()
    ends = torch.stack([low, high], -1).long().to(x.device)
    return (in_order.gather(-1, ends) @ in_order.new_tensor([-1.0, 1.0])) / 2

"""Histograms that are flat where all is well: ranks of chains, ranks of simulations."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from scipy import stats
from torch import Tensor

from pyro_bdl.diagnostics.rank import average_ranks, ordered
from pyro_bdl.plots.style import (
    BAND,
    COLORS,
    GRAY,
    SOFT,
    WHITE,
    array,
    entry,
    legend_below,
    panels,
)

if TYPE_CHECKING:
    from pyro_bdl.calibration.simulation import Calibration

_LEVEL = 0.99
_MOST_BINS = 20
_IN_LEGEND = 8  # chains


def ranks(draws: Mapping[str, Tensor]) -> Figure:
    """Histograms of each chain's ranks among the draws of all chains, a panel for each quantity.

    Chains with the same distribution have flat histograms. A count lies within the band with
    probability 0.99 if the draws are independent and the chains agree; it is then hypergeometric,
    with D of the C D ranks for C chains of D draws. Autocorrelated draws leave the band more often.

    :param draws: name to ``(chains, draws)``, at least 2 chains.
    :raises ValueError: for no quantity, tensors of another shape, or a single chain.

    Source: Vehtari et al. (2021), Rank-normalization, folding, and localization, section 5.
    """
    shapes = {tuple(values.shape) for values in draws.values()}
    chains, length = next(iter(shapes)) if {len(shape) for shape in shapes} == {2} else (0, 0)
    if len(shapes) > 1 or chains < 2:
        raise ValueError(
            f"draws must be (chains, draws) of at least 2 chains, the same for all, got {shapes}"
        )
    bins, total = max(2, min(_MOST_BINS, length // 10)), chains * length
    sizes = np.bincount(((np.arange(total) + 0.5) / total * bins).astype(int), minlength=bins)
    entries = [
        entry(f"chain {i + 1}", color=COLORS[i % len(COLORS)], linewidth=1.6)
        for i in range(min(chains, _IN_LEGEND))
    ]
    return _histograms(
        {name: rank_counts(values, bins) for name, values in draws.items()},
        stats.hypergeom(total, sizes, length), 1.0,
        xlabel="rank / all draws", ylabel="draws", entries=entries,
    )  # fmt: skip


def rank_counts(draws: Tensor, bins: int) -> np.ndarray:
    """For each chain the number of draws whose rank lies in each bin, ``(chains, bins)``.

    Rank r of the n draws of all chains, ties at their mean, lies in bin floor(bins (r - 1/2) / n).

    :param draws: ``(chains, draws)``.
    """
    rank = average_ranks(ordered(draws.detach().cpu().double().reshape(1, -1)))[0]
    place = ((rank - 0.5) / len(rank) * bins).long().reshape(draws.shape)
    return torch.nn.functional.one_hot(place, bins).sum(1).numpy()


def rank_histograms(calibration: "Calibration") -> Figure:
    """Histograms of the truth's ranks among the posterior draws, a panel for each quantity.

    They are flat if inference is exact, valleys if the posterior is too narrow, hills if it is too
    wide, and slopes if it is biased. If the ranks are uniform, a bar lies within the band with
    probability 0.99, see ``Calibration.band``; bars outside the band have another color.

    :param calibration: the result of ``simulation_based_calibration``.

    Source: Talts et al. (2018), Validating Bayesian inference algorithms with SBC, section 5.1.
    """
    bins = calibration.bins
    counts = array(calibration.counts(bins))[:, None]
    return _histograms(
        dict(zip(calibration.names, counts, strict=True)),
        stats.binom(len(calibration.ranks), 1 / bins), calibration.num_draws + 1,
        xlabel="rank of the truth", ylabel="simulations",
        entries=[Patch(color=COLORS[1], linewidth=0, label="outside the band")],
    )  # fmt: skip


def _histograms(
    counts: Mapping[str, np.ndarray],
    law: Any,
    end: float,
    *,
    xlabel: str,
    ylabel: str,
    entries: Sequence[Artist] = (),
) -> Figure:
    """A panel for each name: bars of a single series, lines of several, and the band of the law.

    :param counts: ``(series, bins)`` for each name.
    :param law: the distribution of a count where all is well, of scipy.
    :param end: of the horizontal axis, which begins at 0.
    """
    tail, bins = (1 - _LEVEL) / 2, next(iter(counts.values())).shape[1]
    low, high, expected = (
        np.broadcast_to(values, bins) for values in (law.ppf(tail), law.ppf(1 - tail), law.mean())
    )
    edges = np.linspace(0, end, bins + 1)
    figure, axes = panels(list(counts), 1.8, xlabel=xlabel, ylabel=ylabel, sharex=True, sharey=True)
    for axis, series in zip(axes, counts.values(), strict=True):
        axis.stairs(high, edges, baseline=low, fill=True, color=BAND)
        if len(series) == 1:
            outside = (series[0] < low) | (series[0] > high)
            colors = np.where(outside, COLORS[1], COLORS[0])
            width = end / bins
            axis.bar(edges[:-1], series[0], width, align="edge", color=colors, edgecolor=WHITE)
        else:
            for chain, heights in enumerate(series):
                color = COLORS[chain % len(COLORS)]
                axis.stairs(heights, edges, color=color, linewidth=1.6, baseline=None)
        for line in (low, high):
            axis.stairs(line, edges, color=SOFT, linewidth=0.8, baseline=None)
        axis.stairs(expected, edges, color=GRAY, linestyle="--", linewidth=1, baseline=None)
        axis.set_xlim(0, end)
        axis.grid(visible=False)
    axes[0].set_ylim(0, 1.1 * max(high.max(), *(series.max() for series in counts.values())))
    band = Patch(facecolor=BAND, edgecolor=SOFT, linewidth=0.8, label=f"{100 * _LEVEL:.4g} % band")
    dashes = entry("expected", color=GRAY, linestyle="--", linewidth=1)
    legend_below(figure, [*entries, band, dashes])
    return figure

"""Markov chains: trace plots and rank plots."""

from collections.abc import Mapping

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from scipy import stats
from torch import Tensor

from pyro_bdl.diagnostics.rank import average_ranks, ordered
from pyro_bdl.plots.bars import room_above
from pyro_bdl.plots.style import (
    BAND,
    COLORS,
    GRAY,
    array,
    check_level,
    columns_for,
    legend_below,
    panels,
    title,
)

_IN_LEGEND = 8


def trace(draws: Mapping[str, Tensor]) -> Figure:
    """Each chain's draws in order, a panel for each quantity.

    Chains that mixed look alike and cover the same range all the time.

    :param draws: name to ``(chains, draws)``.
    :raises ValueError: for no quantity, or tensors of another shape.
    """
    chains = _check(draws)
    columns = columns_for(len(draws))
    figure, axes = panels(len(draws), height=1.7, columns=columns, sharex=True)
    for axis, (name, values) in zip(axes, draws.items(), strict=True):
        for chain, line in enumerate(array(values)):
            axis.plot(line, color=_color(chain), linewidth=0.7, alpha=0.8, label=_label(chain))
        title(axis, name)
        axis.margins(x=0)
    for axis in axes[-columns:]:
        axis.set_xlabel("draw")
    _legend(figure, chains)
    return figure


def ranks(draws: Mapping[str, Tensor], *, bins: int | None = None, level: float = 0.99) -> Figure:
    """Histograms of each chain's ranks among the draws of all chains, a panel for each quantity.

    Chains with the same distribution have flat histograms. A count lies within the band with
    probability ``level`` if the draws are independent and the chains agree; it is then
    hypergeometric, with D of the C D ranks for C chains of D draws. Autocorrelated draws leave the
    band more often.

    :param draws: name to ``(chains, draws)``, at least 2 chains.
    :param bins: number of bins of each histogram; by default up to 20, with at least ten expected
        draws in each.
    :param level: probability of the band.
    :raises ValueError: for no quantity, tensors of another shape, a single chain, more bins than
        draws, or a level outside (0, 1).

    Source: Vehtari et al. (2021), Rank-normalization, folding, and localization, section 5.
    """
    chains = _check(draws)
    check_level(level)
    if chains < 2:
        raise ValueError("rank plots compare chains, but there is a single one; see trace")
    length = next(iter(draws.values())).shape[1]
    bins = max(2, min(20, length // 10)) if bins is None else bins
    if not 1 <= bins <= length:
        raise ValueError(f"bins must lie between 1 and the {length} draws, got {bins}")
    low, high, expected = _band(chains, length, bins, level)
    columns = columns_for(len(draws))
    figure, axes = panels(len(draws), height=1.7, columns=columns, sharex=True, sharey=True)
    edges = np.linspace(0, 1, bins + 1)
    most = float(high.max())
    for axis, (name, values) in zip(axes, draws.items(), strict=True):
        axis.stairs(high, edges, baseline=low, fill=True, color=BAND)
        axis.stairs(expected, edges, color=GRAY, linestyle="--", linewidth=1, baseline=None)
        counts = rank_counts(values, bins)
        most = max(most, float(counts.max()))
        for chain, heights in enumerate(counts):
            axis.stairs(
                heights,
                edges,
                color=_color(chain),
                linewidth=1.6,
                label=_label(chain),
                baseline=None,
            )
        title(axis, name)
        axis.set_xlim(0, 1)
        axis.grid(visible=False, axis="x")
    room_above(axes, most)
    for place, axis in enumerate(axes):
        if place % columns == 0:
            axis.set_ylabel("draws")
    for axis in axes[-columns:]:
        axis.set_xlabel("rank / all draws")
    _legend(figure, chains, band=f"{100 * level:.4g} % band")
    return figure


def rank_counts(draws: Tensor, bins: int) -> np.ndarray:
    """For each chain the number of draws whose rank lies in each bin, ``(chains, bins)``.

    Rank r of the n draws of all chains, ties at their mean, lies in bin floor(bins (r - 1/2) / n).

    :param draws: ``(chains, draws)``.
    """
    pooled = draws.detach().cpu().double().reshape(1, -1)
    rank = average_ranks(ordered(pooled))[0]
    place = ((rank - 0.5) / len(rank) * bins).long().reshape(draws.shape)
    return torch.nn.functional.one_hot(place, bins).sum(1).numpy()


def _band(
    chains: int, length: int, bins: int, level: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower end, upper end and mean of a chain's count in each bin."""
    total = chains * length
    sizes = np.bincount(((np.arange(total) + 0.5) / total * bins).astype(int), minlength=bins)
    counts = stats.hypergeom(total, sizes, length)
    return counts.ppf((1 - level) / 2), counts.ppf((1 + level) / 2), counts.mean()


def _check(draws: Mapping[str, Tensor]) -> int:
    """The number of chains."""
    if not draws:
        raise ValueError("there is no quantity to draw")
    shape = next(iter(draws.values())).shape
    for name, values in draws.items():
        if values.dim() != 2 or values.shape != shape:
            raise ValueError(
                f"draws[{name!r}] must have shape (chains, draws), the same for all, but has "
                f"{tuple(values.shape)}"
            )
    return shape[0]


def _color(chain: int) -> str:
    return COLORS[chain % len(COLORS)]


def _label(chain: int) -> str:
    return f"chain {chain + 1}"


def _legend(figure: Figure, chains: int, band: str = "") -> None:
    shown = min(chains, _IN_LEGEND)
    key: list[tuple[Artist, str]]
    key = [(Line2D([], [], color=_color(i), linewidth=1.6), _label(i)) for i in range(shown)]
    if band:
        key.append((Patch(color=BAND, linewidth=0), band))
    legend_below(figure, *zip(*key, strict=True))

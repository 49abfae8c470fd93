"""Chains, sites, pairs of numbers and ranks of simulations."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from scipy import stats
from torch import Tensor

from pyro_bdl.diagnostics.rank import average_ranks, ordered
from pyro_bdl.diagnostics.summary import Summary
from pyro_bdl.plots.style import (
    BAND,
    COLORS,
    GRAY,
    array,
    bars,
    check_level,
    check_posteriors,
    key,
    legend_below,
    panels,
    plain_log_axis,
    styles,
    title,
    titled_panels,
)

if TYPE_CHECKING:
    from pyro_bdl.calibration.simulation import Calibration

_IN_LEGEND = 8  # chains
_SITES = 40
_LEVELS = (0, 0.25, 0.5, 0.75, 1)
_QUANTITIES, _DOTS, _BINS = 6, 500, 25


def trace(draws: Mapping[str, Tensor]) -> Figure:
    """Each chain's draws in order, a panel for each quantity.

    Chains that mixed look alike and cover the same range all the time.

    :param draws: name to ``(chains, draws)``.
    :raises ValueError: for no quantity, or tensors of another shape.
    """
    chains, _ = _check(draws)
    figure, axes = titled_panels(list(draws), height=1.7, xlabel="draw")
    for axis, values in zip(axes, draws.values(), strict=True):
        for chain, line in enumerate(array(values)):
            axis.plot(line, color=COLORS[chain % len(COLORS)], linewidth=0.7, alpha=0.8)
        axis.margins(x=0)
    legend_below(figure, _chains(chains))
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
    chains, length = _check(draws)
    check_level(level)
    if chains < 2:
        raise ValueError("rank plots compare chains, but there is a single one; see trace")
    bins = max(2, min(20, length // 10)) if bins is None else bins
    if not 1 <= bins <= length:
        raise ValueError(f"bins must lie between 1 and the {length} draws, got {bins}")
    low, high, expected = _band(chains, length, bins, level)
    figure, axes = titled_panels(
        list(draws), height=1.7, xlabel="rank / all draws", ylabel="draws", sharey=True
    )
    edges = np.linspace(0, 1, bins + 1)
    counts = [rank_counts(values, bins) for values in draws.values()]
    for axis, heights in zip(axes, counts, strict=True):
        axis.stairs(high, edges, baseline=low, fill=True, color=BAND)
        axis.stairs(expected, edges, color=GRAY, linestyle="--", linewidth=1, baseline=None)
        for chain, own in enumerate(heights):
            color = COLORS[chain % len(COLORS)]
            axis.stairs(own, edges, color=color, linewidth=1.6, baseline=None)
        axis.set(xlim=(0, 1), ylim=(0, 1.1 * max(high.max(), np.max(counts))))
        axis.grid(visible=False, axis="x")
    band = (Patch(color=BAND, linewidth=0), f"{100 * level:.4g} % band")
    legend_below(figure, [*_chains(chains), band])
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


def _check(draws: Mapping[str, Tensor]) -> tuple[int, int]:
    """The number of chains and of their draws."""
    shapes = {tuple(values.shape) for values in draws.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        found = ", ".join(map(str, sorted(shapes))) or "no quantity"
        raise ValueError(f"draws must have shape (chains, draws), the same for all, got {found}")
    ((chains, length),) = shapes
    return chains, length


def _chains(count: int) -> list[tuple[Artist, str]]:
    """Entries of the legend for the first chains."""
    return [
        (Line2D([], [], color=COLORS[i % len(COLORS)], linewidth=1.6), f"chain {i + 1}")
        for i in range(min(count, _IN_LEGEND))
    ]


def rank_histograms(
    calibration: "Calibration", *, bins: int | None = None, level: float = 0.99
) -> Figure:
    """Histograms of the truth's ranks among the posterior draws, a panel for each quantity.

    They are flat if inference is exact, valleys if the posterior is too narrow, hills if it is too
    wide, and slopes if it is biased. If the ranks are uniform, a bar lies within the band with
    probability ``level``; bars outside the band have another color.

    :param calibration: the result of ``simulation_based_calibration``.
    :param bins: number of bins of each histogram, preferably a divisor of the number of ranks; by
        default up to 20.
    :param level: probability of the band, see ``Calibration.band``.
    :raises ValueError: for more bins than ranks, or a level outside (0, 1).

    Source: Talts et al. (2018), Validating Bayesian inference algorithms with SBC, section 5.1.
    """
    check_level(level)
    bins = calibration.bins if bins is None else bins
    counts = array(calibration.counts(bins))
    low, high = calibration.band(level, bins)
    expected = len(calibration.ranks) / bins
    edges = np.linspace(0, calibration.num_draws + 1, bins + 1)
    figure, axes = titled_panels(
        calibration.names, height=1.9, xlabel="rank of the truth", ylabel="simulations", sharey=True
    )
    for axis, heights in zip(axes, counts, strict=True):
        outside = (heights < low) | (heights > high)
        colors = np.where(outside, COLORS[1], COLORS[0])
        bars(axis, edges, heights, band=(low, high), expected=expected, color=colors)
    axes[0].set_ylim(0, 1.1 * max(high, counts.max()))
    legend_below(figure, [*key(level), (Patch(color=COLORS[1], linewidth=0), "outside the band")])
    return figure


def convergence(summary: Summary) -> Figure:
    """Median, middle half and range of R-hat and bulk ESS over the numbers of each site.

    The dashed lines are the summary's limits. If there are more than 40 sites, those with the
    largest R-hats are shown, in the order of the program.

    :param summary: the result of ``diagnostics.summary``.
    :raises ValueError: if no site has an R-hat, as with constants or a single chain.
    """
    known = {
        site: (_known(found.rhat), _known(found.ess_bulk))
        for site, found in summary.by_site.items()
    }
    known = {site: both for site, both in known.items() if len(both[0])}
    if not known:
        raise ValueError("no site has an R-hat: all are constant, or of a single chain")
    worst = sorted(known, key=lambda site: -known[site][0].max(initial=0.0))[:_SITES]
    shown = [site for site in known if site in worst]
    figure, (left, right) = panels(2, height=0.9 + 0.24 * len(shown), columns=1, sharey=True)
    for row, site in enumerate(shown):
        for axis, values in zip((left, right), known[site], strict=True):
            if len(values):
                _draw(axis, row, np.quantile(values, _LEVELS))
    left.axvline(summary.rhat_limit, color=COLORS[1], linestyle="--", linewidth=1.2)
    right.axvline(summary.ess_limit, color=COLORS[1], linestyle="--", linewidth=1.2)
    title(left, "R-hat, to the left of the line is good")
    title(right, "effective draws (bulk ESS), to the right is good")
    right.set_xscale("log")
    plain_log_axis(right.xaxis)
    for axis in (left, right):
        axis.grid(visible=False, axis="y")
        axis.set_yticks(range(len(shown)), shown, fontsize=9)
    left.set_ylim(len(shown) - 0.5, -0.5)
    entries = [
        (Line2D([], [], color=COLORS[0], linewidth=3.5, marker="o"), "median, middle half"),
        (Line2D([], [], color=COLORS[0], linewidth=1.2), "range"),
        (Line2D([], [], color=COLORS[1], linestyle="--", linewidth=1.2), "limit"),
    ]
    legend_below(figure, entries)
    return figure


def _known(values: Tensor) -> np.ndarray:
    numbers = array(values).ravel()
    return numbers[np.isfinite(numbers)]


def _draw(axis: Axes, row: int, quantiles: np.ndarray) -> None:
    low, lower, middle, upper, high = quantiles
    axis.plot([low, high], [row, row], color=COLORS[0], linewidth=1.2)
    axis.plot([lower, upper], [row, row], color=COLORS[0], linewidth=3.5)
    axis.plot(middle, row, "o", color=COLORS[0], markersize=5, markeredgecolor="white")


def pairs(draws: Mapping[str, Mapping[str, Tensor]], *, reference: str | None = None) -> Figure:
    """Densities on the diagonal, draws of each pair below it.

    At most 500 evenly spaced draws are shown as dots; the densities use all draws. Draws that are
    all equal are shown as a line and one dot.

    :param draws: posterior to quantity to ``(S,)`` draws, the same quantities for all, at most 6.
    :param reference: name of the posterior with which the others are compared.
    :raises ValueError: for no posterior or quantity, an unknown reference, more than 6 quantities,
        or posteriors that differ in quantities.
    """
    check_posteriors(draws, reference)
    names = list(next(iter(draws.values())))
    if not 1 <= len(names) <= _QUANTITIES:
        raise ValueError(
            f"pairs draws 1 to {_QUANTITIES} quantities, got {len(names)}: choose some"
        )
    for posterior, values in draws.items():
        if set(values) != set(names):
            raise ValueError(
                f"draws[{posterior!r}] has the quantities {', '.join(values) or 'none'}, but the "
                f"first posterior has {', '.join(names)}"
            )
    numbers = {q: {name: array(draws[q][name]) for name in names} for q in draws}
    look = styles(draws, reference)
    count = len(names)
    figure, axes = panels(
        count**2, height=3.2 if count == 1 else 4.6 / count, columns=count, sharex="col"
    )
    for place, axis in enumerate(axes):
        row, column = divmod(place, count)
        if column > row:
            axis.remove()
            continue
        for posterior, drawn in numbers.items():
            color = look[posterior]["color"]
            if row == column:
                _density(axis, drawn[names[row]], color)
            else:
                chosen = _thinned(len(drawn[names[row]]))
                x, y = drawn[names[column]][chosen], drawn[names[row]][chosen]
                mark = look[posterior]["marker"]
                axis.plot(x, y, mark, color=color, markersize=3, alpha=0.5, markeredgewidth=0)
        axis.grid(visible=False)
        axis.margins(0.08)
        for each in (axis.xaxis, axis.yaxis):
            each.set_major_locator(MaxNLocator(3))
        if row == column:
            axis.set_yticks([])
            axis.set_ylim(bottom=0)
            title(axis, names[row])
        if row == count - 1:
            axis.set_xlabel(names[column])
        else:
            axis.tick_params(labelbottom=False)
        if column == 0 and row:
            axis.set_ylabel(names[row])
        elif column:
            axis.tick_params(labelleft=False)
    entries = [(Line2D([], [], linewidth=2.5, **look[q]), q) for q in draws]
    legend_below(figure, entries)
    return figure


def _density(axis: Axes, values: np.ndarray, color: str) -> None:
    """Draw a histogram of area 1, or a line if all values are equal."""
    if np.ptp(values) == 0:
        axis.axvline(values[0], color=color, linewidth=1.6)
    else:
        heights, edges = np.histogram(values, bins=_BINS, density=True)
        axis.stairs(heights, edges, color=color, linewidth=1.6)


def _thinned(count: int) -> np.ndarray:
    """Evenly spaced positions, at most 500."""
    shown = min(count, _DOTS)
    return np.arange(shown) * count // shown

"""Posterior predictive checks: draws of the data beside the data, PITs, residuals."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from scipy import stats
from scipy.special import ndtri
from torch import Tensor

from pyro_bdl.plots.style import (
    BAND,
    GRAY,
    INK,
    SOFT,
    array,
    check_points,
    check_posteriors,
    entry,
    legend_below,
    panels,
    styles,
)

_LEVEL = 0.95
_MOST_POINTS, _SIMULATIONS = 100, 10_000
_MOST_VALUES = 30  # of whole numbers with more the density is drawn
_SHOWN = 20  # draws in a panel
_GRID = 100
_RESIDUAL_BINS = 10


def ppc(
    draws: Mapping[str, Tensor],
    y: Tensor,
    *,
    statistics: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    reference: str | None = None,
    xlabel: str = "y",
) -> Figure:
    """Targets beside targets drawn from each posterior: their densities, or some statistics.

    Densities are by a Gaussian kernel, of one bandwidth for all (Silverman's of the targets); of up
    to 30 different whole numbers the shares of each. Of a statistic T the histogram of T(draw) is
    shown, T(y) as a line, and p, the share of draws with T above T(y).

    Example::

        >>> draws = {"posterior": torch.randn(100, 50)}
        >>> largest = {"largest": lambda y: y.amax(-1)}
        >>> figure = bdl.plots.ppc(draws, torch.randn(50), statistics=largest)

    :param draws: ``(S, N, ...)`` for each posterior, draws of the targets with noise.
    :param y: ``(N, ...)``; numbers that are NaN were not seen, and are left out of the draws too.
    :param statistics: name to a function of ``(S, M)`` targets, all that were seen, to ``(S,)``.
    :param reference: name of the reference, drawn in dark gray.
    :param xlabel: name of the target, with units.
    :raises ValueError: for no posterior, an unknown reference, or draws that do not fit y.

    Source: Gabry, Simpson, Vehtari, Betancourt, Gelman (2019), Visualization in Bayesian workflow,
    section 5.
    """
    check_posteriors(draws, reference)
    check_points(draws, len(y))
    targets = array(y.reshape(-1))
    seen = ~np.isnan(targets)
    kept = {name: values.flatten(1)[:, seen] for name, values in draws.items()}
    looks = styles(draws, reference)
    if statistics is not None:
        return _statistics(kept, y.reshape(-1)[seen], statistics, looks)
    targets = targets[seen]
    arrays = {name: array(v[_evenly(len(v), _SHOWN)]) for name, v in kept.items()}
    curves = _shares if _are_few(targets, arrays) else _densities
    grid, of_targets, of_draws = curves(targets, arrays)
    figure, axes = panels(
        list(draws), 1.8, xlabel=xlabel, ylabel="share" if curves is _shares else "density",
        looks=looks, sharex=True, sharey=True,
    )  # fmt: skip
    mark: dict[str, Any] = {"marker": "o", "markersize": 3} if curves is _shares else {}
    for axis, name in zip(axes, draws, strict=True):
        axis.plot(grid, of_draws[name].T, color=looks[name]["color"], linewidth=0.6, alpha=0.5)
        axis.plot(grid, of_targets, color=INK, linewidth=1.8, **mark)
        axis.set_ylim(0, None)
    legend_below(
        figure,
        [entry("targets", color=INK, linewidth=1.8), entry("draws", color=SOFT, linewidth=0.8)],
    )
    return figure


def _evenly(count: int, most: int) -> np.ndarray:
    return np.linspace(0, count - 1, min(count, most)).round().astype(int)


def _are_few(targets: np.ndarray, draws: Mapping[str, np.ndarray]) -> bool:
    """Return True for whole numbers of a small range, such as counts."""
    every = [targets, *draws.values()]
    if any((values != np.round(values)).any() for values in every):
        return False
    return max(values.max() for values in every) - targets.min() < _MOST_VALUES


def _shares(
    targets: np.ndarray, draws: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """The share of each whole number."""
    every = np.concatenate([targets, *(v.ravel() for v in draws.values())])
    grid = np.arange(every.min(), every.max() + 1)

    def shares(values: np.ndarray) -> np.ndarray:
        return (values[..., None] == grid).mean(-2)

    return grid, shares(targets), {name: shares(v) for name, v in draws.items()}


def _densities(
    targets: np.ndarray, draws: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Kernel densities where the targets and most draws lie."""
    spread = min(targets.std(), stats.iqr(targets) / 1.349) or targets.std() or 1.0
    width = 0.9 * spread * len(targets) ** -0.2
    every = [np.quantile(v, [0.005, 0.995]) for v in draws.values()]
    low = min(targets.min(), *(ends[0] for ends in every)) - 2 * width
    high = max(targets.max(), *(ends[1] for ends in every)) + 2 * width
    grid = np.linspace(low, high, _GRID)

    def density(values: np.ndarray) -> np.ndarray:
        return stats.norm.pdf((grid[:, None] - values) / width).mean(-1) / width

    of_draws = {name: np.stack([density(row) for row in v]) for name, v in draws.items()}
    return grid, density(targets), of_draws


def _statistics(
    draws: Mapping[str, Tensor],
    y: Tensor,
    statistics: Mapping[str, Callable[[Tensor], Tensor]],
    looks: Mapping[str, Mapping],
) -> Figure:
    titles = [f"{name}: {title}" for name in draws for title in statistics]
    titles = titles if len(draws) > 1 else list(statistics)
    figure, axes = panels(
        titles, 1.6, columns=min(2, len(statistics)), ylabel="draws",
        looks={title: looks[name] for title, name in zip(
            titles, (n for n in draws for _ in statistics), strict=True
        )},
    )  # fmt: skip
    places = [(name, title) for name in draws for title in statistics]
    for axis, (name, title) in zip(axes, places, strict=True):
        values = array(statistics[title](draws[name]))
        at = array(statistics[title](y[None])).item()
        above = (values > at).mean() + 0.5 * (values == at).mean()
        axis.hist(values, bins=20, color=looks[name]["color"], alpha=0.7)
        axis.axvline(at, color=INK, linewidth=1.8)
        axis.set_xlabel(f"p = {above:.2g}")
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.grid(visible=False)
    legend_below(figure, [entry("targets", color=INK, linewidth=1.8)])
    return figure


def pit_ecdf(pit: Mapping[str, Tensor], *, reference: str | None = None) -> Figure:
    """Distribution functions of the PITs of targets less that of a uniform law, F(u) - u.

    It stays within the band, all along, with probability 0.95 if the PITs are independent and
    uniform. Below and then above 0 (a rising line through the middle) the predictions are too wide;
    above and then below they are too narrow; on one side they are biased, for targets that are too
    large below 0. A line that leaves the band is thicker. PITs of leave-one-out (``LOO.pit``)
    depend on each other a little.

    Example::

        >>> y, draws = torch.randn(50), torch.randn(200, 50)
        >>> figure = bdl.plots.pit_ecdf({"posterior": bdl.metrics.pit(draws, y)})

    :param pit: ``(N,)`` for each posterior, from ``metrics.pit`` or ``LOO.pit``; NaN is left out.
    :param reference: name of the reference, drawn in dark gray.
    :raises ValueError: for no posterior, or an unknown reference.

    Source: Säilynoja, Bürkner, Vehtari (2022), Graphical test for discrete uniformity and its
    applications in goodness-of-fit evaluation and multiple sample comparison, algorithm 1.
    """
    check_posteriors(pit, reference)
    looks = styles(pit, reference)
    figure, axes = panels(
        list(pit), 1.8, xlabel="PIT", ylabel="F(u) - u", looks=looks, sharex=True, sharey=True
    )
    known = {name: array(values.reshape(-1)) for name, values in pit.items()}
    known = {name: np.sort(values[~np.isnan(values)]) for name, values in known.items()}
    bands = {count: uniform_band(count) for count in set(map(len, known.values()))}
    for axis, (name, values) in zip(axes, known.items(), strict=True):
        u, low, high = bands[len(values)]
        difference = np.searchsorted(values, u, side="right") / len(values) - u
        outside = ((difference < low) | (difference > high)).any()
        axis.fill_between(u, low, high, color=BAND, linewidth=0)
        for line in (low, high):
            axis.plot(u, line, color=SOFT, linewidth=0.8)
        axis.axhline(0.0, color=GRAY, linestyle="--", linewidth=1)
        axis.plot(u, difference, color=looks[name]["color"], linewidth=2.4 if outside else 1.4)
        axis.set_xlim(0, 1)
        axis.grid(visible=False)
    label = f"{100 * _LEVEL:.4g} % band of the whole line"
    legend_below(figure, [Patch(facecolor=BAND, edgecolor=SOFT, linewidth=0.8, label=label)])
    return figure


def uniform_band(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points u, and the ends between which F(u) - u of uniform numbers lies at all of them with
    probability 0.95.

    At each point the ends are quantiles g / 2 and 1 - g / 2 of Binomial(N, u); g is the one with
    which 95 % of 10,000 simulated lines, always the same, stay between all ends.

    :param count: N.
    """
    points = min(_MOST_POINTS, max(10, count))
    u = np.arange(1, points) / points
    cells = np.random.default_rng(0).multinomial(count, np.full(points, 1 / points), _SIMULATIONS)
    counts, law = cells[:, :-1].cumsum(1), stats.binom(count, u)
    least = np.ones(_SIMULATIONS)
    for column, place in zip(counts.T, u, strict=True):
        values = np.arange(column.min(), column.max() + 1)  # each tail is computed once
        at = stats.binom(count, place)
        tails = 2 * np.minimum(at.cdf(values), at.sf(values - 1))
        least = np.minimum(least, tails[column - values[0]])
    g = float(np.quantile(least, 1 - _LEVEL))
    return u, law.ppf(g / 2) / count - u, law.ppf(1 - g / 2) / count - u


def residuals(
    x: Tensor, pit: Mapping[str, Tensor], *, reference: str | None = None, xlabel: str = "x"
) -> Figure:
    """Residuals of each posterior along an input: the standard normal quantiles of its PITs.

    They are independent of x and standard normal if the predictions are right, for counts and
    censored targets too. Dots are their means in ten groups of equally many targets, with the band
    in which each lies with probability 0.99: +- 2.58 / sqrt(n).

    :param x: ``(N,)``, an input of each target.
    :param pit: ``(N,)`` for each posterior, from ``metrics.pit`` or ``LOO.pit``; NaN is left out.
    :param reference: name of the reference, drawn in dark gray.
    :param xlabel: name of the input, with units.
    :raises ValueError: for no posterior, an unknown reference, or inputs that do not fit.

    Source: Dunn & Smyth (1996), Randomized quantile residuals.
    """
    check_posteriors(pit, reference)
    check_points({name: values[None] for name, values in pit.items()}, len(x))
    looks = styles(pit, reference)
    figure, axes = panels(
        list(pit), 1.8, xlabel=xlabel, ylabel="residual, in sds", looks=looks, sharex=True,
        sharey=True,
    )  # fmt: skip
    inputs = array(x.reshape(-1))
    for axis, (name, tensor) in zip(axes, pit.items(), strict=True):
        values = array(tensor.reshape(-1))
        order = np.argsort(inputs, kind="stable")
        order = order[~np.isnan(values[order])]
        z = ndtri(values.clip(1e-10, 1 - 1e-10))
        color = looks[name]["color"]
        axis.plot(
            inputs[order], z[order], ".", color=color, markersize=4, alpha=0.35, markeredgewidth=0
        )
        for part in np.array_split(order, min(_RESIDUAL_BINS, max(1, len(order) // 5))):
            end = float(ndtri(0.995)) / len(part) ** 0.5
            first, last = inputs[part[0]], inputs[part[-1]]
            axis.fill_between([first, last], -end, end, color=GRAY, alpha=0.35, linewidth=0)
            axis.plot(
                inputs[part].mean(),
                z[part].mean(),
                color=INK,
                **{"marker": looks[name]["marker"], "markersize": 5},
            )
        axis.axhline(0.0, color=GRAY, linestyle="--", linewidth=1)
    legend_below(
        figure,
        [
            entry("mean of a group", color=INK, marker="o", linestyle="none", markersize=5),
            Patch(facecolor=GRAY, alpha=0.35, linewidth=0, label="99 % band of a mean"),
        ],
    )
    return figure

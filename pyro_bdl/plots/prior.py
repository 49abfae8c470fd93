"""Figures of a prior predictive check: the function before any fit."""

from collections.abc import Mapping

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from pyro_bdl.plots.style import (
    INK,
    array,
    check_points,
    check_posteriors,
    entry,
    legend_below,
    panels,
    styles,
)

_BANDS = (0.9, 0.5)


def prior_predictive(
    x: Tensor,
    draws: Mapping[str, Tensor],
    *,
    y: Tensor | None = None,
    functions: int = 10,
    xlabel: str = "x",
    ylabel: str = "f",
) -> Figure:
    """Functions and their bands along a single input, a panel for each prior; last, the sd of f.

    Bands hold the central 50 % and 90 % of the draws at each x. The last panel shows which share of
    the draws has an sd of f over the inputs, in units of f, up to a value: how much a function of
    that prior moves. The sd of the targets is marked there, since f is to explain them.

    Example::

        >>> x = torch.linspace(-2, 2, 50)[:, None]
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> draws = bdl.prior_predictive(model, x, num_samples=200)
        >>> figure = bdl.plots.prior_predictive(x, {"Normal(0, 1)": draws["f"]})
        >>> figure.savefig("prior.svg")

    :param x: ``(N,)`` or ``(N, 1)``, at least two inputs in any order.
    :param draws: ``(S, N)`` for each prior, of the function or the target at ``x``.
    :param y: targets of any shape, or numbers on their scale.
    :param functions: how many draws are shown as lines.
    :param xlabel: label of the horizontal axis, with units.
    :param ylabel: name of the function, with units.
    :raises ValueError: for no prior, or draws that do not fit x.
    """
    check_posteriors(draws, None)
    check_points(draws, x.numel())
    order = np.argsort(array(x.reshape(-1)), kind="stable")
    grid = array(x.reshape(-1))[order]
    looks = styles(draws, None)
    titles = [*draws, f"sd of {ylabel} along {xlabel}"]
    figure, axes = panels(titles, 1.7, columns=1, ylabel=ylabel, looks={**looks, titles[-1]: {}})
    for name, axis in zip(draws, axes, strict=False):
        values, color = array(draws[name])[:, order], looks[name]["color"]
        for level in _BANDS:
            low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2], axis=0)
            axis.fill_between(grid, low, high, color=color, alpha=0.2, linewidth=0)
        axis.plot(grid, values[:functions].T, color=color, linewidth=0.7, alpha=0.8)
        axis.set(xlabel=xlabel, ylim=_limits(values))
    last = axes[-1]
    for name, tensor in draws.items():
        spread = np.sort(array(tensor).std(1, ddof=1))
        share = np.arange(1, len(spread) + 1) / len(spread)
        last.step(
            spread, share, where="post", linewidth=1.5, color=looks[name]["color"], label=name
        )
    last.set(xscale="log", ylim=(0, 1), xlabel=f"sd of {ylabel}", ylabel="share of draws")
    color = next(iter(looks.values()))["color"]
    entries: list[Artist] = [
        Patch(color=color, alpha=0.3, linewidth=0, label="50 % and 90 % of the draws"),
        entry("single draws", color=color, linewidth=0.7),
    ]
    if y is not None:
        last.axvline(float(array(y).std()), color=INK, linestyle="--", linewidth=1)
        entries.append(entry("sd of the targets", color=INK, linestyle="--", linewidth=1))
    legend_below(figure, entries)
    return figure


def _limits(values: np.ndarray) -> tuple[float, float]:
    """Limits that hold the central 98 % of all numbers: heavy tails would flatten the rest."""
    low, high = np.quantile(values, [0.01, 0.99])
    room = 0.1 * (high - low) or 1.0
    return float(low - room), float(high + room)

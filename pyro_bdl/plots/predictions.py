"""Predictions of posteriors and priors: bands, calibration, maps, moments against the reference."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter
from scipy.stats import binom
from torch import Tensor

from pyro_bdl import metrics
from pyro_bdl.plots.style import (
    BAND,
    COLORS,
    GRAY,
    INK,
    SMALL,
    TEXT,
    WHITE,
    array,
    check_points,
    check_posteriors,
    entry,
    legend_below,
    panels,
    styles,
)
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.validation import one_of, real_number

_MAX_POINTS = 400
_LEVELS = (0.1, 0.5, 0.9)
_CLASSES = LinearSegmentedColormap.from_list("classes", (COLORS[0], WHITE, COLORS[1]), N=20)


def predictive_bands(
    x: Tensor,
    draws: Mapping[str, Tensor],
    *,
    reference: str | None = None,
    x_train: Tensor | None = None,
    y_train: Tensor | None = None,
    level: float = 0.9,
    xlabel: str = "x",
    ylabel: str = "y",
) -> Figure:
    """Mean and central interval along a single input, a panel for each posterior.

    The reference is drawn into each panel as dashed lines.

    Example::

        >>> x = torch.linspace(-2, 2, 50)[:, None]
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> draws = bdl.Predictive(model, num_samples=20)(x)
        >>> figure = bdl.plots.predictive_bands(x, {"prior": draws["f"]})
        >>> figure.savefig("bands.svg")

    :param x: ``(N,)`` or ``(N, 1)``, inputs in any order.
    :param draws: ``(S, N)`` for each posterior, of the function or the target at ``x``.
    :param reference: name of the posterior with which the others are compared; None for no
        reference.
    :param x_train: ``(M,)`` or ``(M, 1)``, training data to show as dots.
    :param y_train: ``(M,)`` or ``(M, 1)``, their targets.
    :param level: share of the draws within the band.
    :param xlabel: label of the horizontal axis, with units.
    :param ylabel: label of the vertical axis, with units.
    :raises ValueError: for no posterior, a reference that is not among them, a level outside (0,
        1), or draws that do not fit x.
    """
    check_posteriors(draws, reference)
    level = real_number(level, "level", "(0, 1)")
    check_points(draws, x.numel())
    order = np.argsort(array(x.reshape(-1)), kind="stable")
    grid = array(x.reshape(-1))[order]
    bands = {name: _band(array(values)[:, order], level) for name, values in draws.items()}
    shown = [name for name in draws if name != reference] or list(draws)
    looks = styles(draws, reference)
    height = 2.3 if len(shown) <= 3 else 1.6
    figure, axes = panels(
        shown, height, xlabel=xlabel, ylabel=ylabel, looks=looks, sharex=True, sharey=True
    )
    entries: list[Artist]
    label = f"mean and {100 * level:.4g} % interval"
    entries = [Patch(color=GRAY, alpha=0.5, linewidth=0, label=label)]
    if reference is not None and shown != [reference]:
        entries += [
            entry(f"{reference}: mean", color=INK, linewidth=1, linestyle="--"),
            entry(f"{reference}: interval", color=INK, linewidth=1, linestyle=":"),
        ]
    if x_train is not None and y_train is not None:
        entries.append(entry("training data", color=INK, marker=".", linestyle="none"))
    for axis, name in zip(axes, shown, strict=True):
        low, mean, high = bands[name]
        color = looks[name]["color"]
        axis.fill_between(grid, low, high, color=color, alpha=0.25, linewidth=0)
        axis.plot(grid, mean, color=color, linewidth=2)
        if reference is not None and name != reference:
            low, mean, high = bands[reference]
            axis.plot(grid, mean, color=INK, linewidth=1, linestyle="--")
            axis.plot(grid, low, color=INK, linewidth=1, linestyle=":")
            axis.plot(grid, high, color=INK, linewidth=1, linestyle=":")
        if x_train is not None and y_train is not None:
            points = array(x_train.reshape(-1)), array(y_train.reshape(-1))
            axis.plot(*points, ".", color=INK, markersize=4, alpha=0.6)
    legend_below(figure, entries)
    return figure


def _band(values: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower end, mean and upper end."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, values.mean(0), high


def calibration(
    predictions: Mapping[str, Tensor],
    y: Tensor,
    *,
    task: str,
    reference: str | None = None,
    bins: int = 10,
) -> Figure:
    """Coverage of central intervals for a regression, a reliability diagram for classes.

    A posterior is calibrated on the diagonal and overconfident below it. The band around it holds
    each coverage with probability 0.99 if the intervals are right and the targets independent, and
    the bar at each point of a reliability diagram the share predicted right if the confidences are:
    quantiles of the sum of Bernoulli variables with these confidences.

    :param predictions: regression: draws ``(S, N, ...)`` of the target, noise included;
        classification: probabilities ``(N, C)``.
    :param y: ``(N, ...)`` targets, NaN where none was seen, or ``(N,)`` class indices.
    :param task: ``"regression"`` or ``"classification"``.
    :param reference: name of the reference, drawn in dark gray.
    :param bins: number of bins of the confidence in a reliability diagram; empty ones are left out.
    :raises ValueError: for no posterior, an unknown task or reference, or shapes that do not fit.
    """
    check_posteriors(predictions, reference)
    one_of(task, "task", ("regression", "classification"))
    figure, (axis,) = panels([""], 4.6)
    axis.plot([0, 1], [0, 1], color=GRAY, linewidth=1, linestyle="--", zorder=1)
    looks = styles(predictions, reference)
    for name, values in predictions.items():
        where: Any = np.arange(1, 20) / 20
        if task == "regression":
            seen = ~y.detach().isnan()
            covered = metrics.interval_coverage(values[:, seen], y[seen], level=where.tolist())
            observed, count = array(covered), int(seen.sum())
            band = [binom.ppf(end, count, where) / count for end in (0.005, 0.995)]
        else:
            where, observed, share = map(array, metrics.reliability(values, y, bins=bins))
            where, observed = where[share > 0], observed[share > 0]
            ends = _consistency(array(values.max(-1).values), bins)
            axis.vlines(where, *ends, color=looks[name]["color"], linewidth=4, alpha=0.25)
        axis.plot(where, observed, linewidth=1.5, markersize=5, label=name, **looks[name])
    if task == "regression":
        axis.fill_between(where, *band, color=BAND, linewidth=0, zorder=0)
    axis.text(0.97, 0.06, "overconfident", ha="right", color=GRAY, fontstyle="italic")
    axis.text(0.03, 0.94, "underconfident", va="center", color=GRAY, fontstyle="italic")
    labels = {
        "regression": ("level of the central interval", "share of test targets inside"),
        "classification": ("confidence of the predicted class", "share predicted right"),
    }
    axis.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axis.set(xlabel=labels[task][0], ylabel=labels[task][1])
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        each.set_major_locator(MaxNLocator(5))
    legend_below(figure, axis)
    return figure


def _consistency(confidence: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """The ends between which the share predicted right lies with probability 0.99, in each bin of
    ``metrics.reliability`` that is not empty, if it is right with probability ``confidence``."""
    place = (np.ceil(confidence * bins) - 1).clip(0, bins - 1)
    low: list[float] = []
    high: list[float] = []
    for each in np.unique(place):
        law = law_of_sum(confidence[place == each]).cumsum()
        # the smallest counts at which the distribution function reaches both levels
        for ends, level in ((low, 0.005), (high, 0.995)):
            ends.append(np.searchsorted(law, level) / (len(law) - 1))
    return np.array(low), np.array(high)


def law_of_sum(p: np.ndarray) -> np.ndarray:
    """Probabilities of 0 ... N of the sum of N Bernoulli variables: its characteristic function,
    transformed back."""
    size = len(p) + 1
    angle = np.exp(2j * np.pi * np.arange(size // 2 + 1) / size)
    values = np.ones(len(angle), complex)
    for each in p:
        values *= 1 + each * (angle - 1)
    return np.fft.irfft(values.conj(), size).clip(0)


def function_space(
    draws: Mapping[str, Tensor], *, reference: str, quantity: str = "prediction"
) -> Figure:
    """Mean and sd of the function at each test point against those of the reference.

    :param draws: ``(S, N, ...)`` for each posterior. If there are more than 400 numbers at the test
        points, evenly spaced ones are shown.
    :param reference: name of the posterior on the horizontal axis.
    :param quantity: name of the quantity, with units.
    :raises ValueError: for no other posterior than the reference, or test points that differ in
        number.
    """
    check_posteriors(draws, reference)
    check_points(draws, draws[reference].shape[1])
    looks = styles(draws, reference)
    figure, axes = panels(
        [f"{word} of {quantity}" for word in ("mean", "sd")], 4.0,
        columns=1, ylabel="each posterior",
    )  # fmt: skip
    moments = {name: _moments(values) for name, values in draws.items()}
    for place, axis in enumerate(axes):
        for name in draws:
            if name != reference:
                axis.plot(
                    moments[reference][place], moments[name][place], linestyle="none",
                    markersize=5, markeredgewidth=0, alpha=0.55, label=name, **looks[name],
                )  # fmt: skip
        axis.margins(0.05)
        limits = np.array([axis.get_xlim(), axis.get_ylim()])
        ends = limits[:, 0].min(), limits[:, 1].max()
        axis.plot(ends, ends, color=GRAY, linestyle="--", linewidth=1, zorder=1)
        axis.set(xlim=ends, ylim=ends, aspect="equal", xlabel=reference)
        for each in (axis.xaxis, axis.yaxis):
            each.set_major_locator(MaxNLocator(5))
    legend_below(figure, axes[0])
    return figure


def _moments(values: Tensor) -> tuple[np.ndarray, np.ndarray]:
    flat = double(values.detach().flatten(1))
    if flat.shape[1] > _MAX_POINTS:
        flat = flat[:, torch.linspace(0, flat.shape[1] - 1, _MAX_POINTS, device="cpu").long()]
    return array(flat.mean(0)), array(flat.std(0, correction=min(1, len(flat) - 1)))


def probability_maps(
    x: Tensor,
    probabilities: Mapping[str, Tensor],
    *,
    x_train: Tensor | None = None,
    y_train: Tensor | None = None,
    reference: str | None = None,
    labels: Sequence[str] = ("first input", "second input"),
) -> Figure:
    """The probability of class 1 over two inputs, a map for each posterior.

    Lines are drawn where it is 0.1, 0.5 (thick) and 0.9.

    Example::

        >>> side = torch.linspace(-2, 2, 20)
        >>> x = torch.cartesian_prod(side, side)
        >>> model = bdl.models.BinaryClassification(bdl.bayesianize(torch.nn.Linear(2, 1)))
        >>> p = bdl.Predictive(model, num_samples=20)(x)["f"].sigmoid().mean(0)
        >>> figure = bdl.plots.probability_maps(x, {"prior": p})
        >>> figure.savefig("maps.svg")

    :param x: ``(N, 2)``, inputs that fill a rectangular grid, in any order.
    :param probabilities: ``(N,)`` for each posterior, between 0 and 1.
    :param x_train: ``(M, 2)``, training inputs.
    :param y_train: ``(M,)``, their classes 0 and 1; None shows all alike.
    :param reference: name of the posterior that others are compared with; drawn last.
    :param labels: names of the two inputs.
    :raises ValueError: for no posterior, a reference that is not among them, inputs that do not
        fill a grid, or probabilities that do not fit them.
    """
    check_posteriors(probabilities, reference)
    if x.dim() != 2 or x.shape[1] != 2:
        raise ValueError(f"x must have shape (N, 2), but has {tuple(x.shape)}")
    points = array(x)
    shown = [name for name in probabilities if name != reference]
    shown += [] if reference is None else [reference]
    figure, axes = panels(
        shown, 2.1, columns=2, xlabel=labels[0], ylabel=labels[1],
        looks=styles(probabilities, reference), sharex=True, sharey=True,
    )  # fmt: skip
    drawn: ScalarMappable
    for name, axis in zip(shown, axes, strict=True):
        values = array(probabilities[name])
        grid = _grid(points, values) if values.shape == (len(points),) else None
        if grid is None or not ((values >= 0) & (values <= 1)).all():
            raise ValueError(
                f"probabilities[{name!r}], of shape {tuple(values.shape)}, must have a number "
                "between 0 and 1 for each row of x, and x must fill a rectangular grid, as "
                "torch.cartesian_prod makes it"
            )
        drawn = axis.pcolormesh(
            *grid, vmin=0, vmax=1, cmap=_CLASSES, shading="nearest", rasterized=True
        )
        axis.grid(visible=False)
        axis.contour(*grid, levels=_LEVELS, colors=INK, linewidths=(0.7, 1.6, 0.7))
        if x_train is not None:
            classes = np.zeros(len(x_train)) if y_train is None else array(y_train)
            for value, mark, color in zip(np.unique(classes), "os", COLORS, strict=False):
                axis.plot(
                    *array(x_train)[classes == value].T, mark, color=color, markersize=4,
                    markeredgecolor=WHITE, markeredgewidth=0.6,
                )  # fmt: skip
    bar = figure.colorbar(drawn, ax=axes, location="bottom", aspect=35, shrink=0.9)
    bar.ax.xaxis.set_major_locator(MaxNLocator(5))
    bar.ax.tick_params(labelsize=SMALL, colors=INK)
    bar.set_label("probability of class 1", fontsize=TEXT, color=INK)
    return figure


def _grid(points: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, ...] | None:
    """The two axes and the values ``(len(second), len(first))`` if the points fill a grid, else
    None."""
    first, column = np.unique(points[:, 0], return_inverse=True)
    second, row = np.unique(points[:, 1], return_inverse=True)
    table = np.full((len(second), len(first)), np.nan)
    filled = np.zeros(table.shape, bool)
    table[row, column], filled[row, column] = values, True
    is_grid = filled.all() and filled.size == len(points) and min(filled.shape) > 1
    return (first, second, table) if is_grid else None


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

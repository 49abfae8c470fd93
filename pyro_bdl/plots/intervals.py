"""Forest plots: a panel for each quantity, with a row for each posterior's intervals."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from pyro_bdl.plots.style import (
    BAND,
    GRAY,
    array,
    check_level,
    check_points,
    check_posteriors,
    legend_below,
    panels,
    styles,
    title,
)

_INNER = 0.5


def forest(
    draws: Mapping[str, Tensor],
    *,
    reference: str | None = None,
    points: Sequence[int] | None = None,
    labels: Sequence[str] | None = None,
    level: float = 0.9,
    quantity: str = "function",
) -> Figure:
    """Posterior intervals of the function at chosen test points, see :func:`intervals`.

    :param draws: ``(S, N, ...)`` for each posterior, of the function at the test points.
    :param reference: name of the posterior with which the others are compared.
    :param points: positions in the flattened ``(N, ...)``; by default four that range from the
        smallest to the largest sd of the reference, see :func:`chosen_points`.
    :param labels: a title for each of ``points``.
    :param level: probability of the outer interval.
    :param quantity: name of the quantity, with units.
    :raises ValueError: for no posterior, an unknown reference, or draws at different points.
    """
    check_posteriors(draws, reference)
    check_points(draws)
    first = draws[reference or next(iter(draws))]
    chosen = chosen_points(first) if points is None else list(points)
    titles = [point_name(place, first) for place in chosen] if labels is None else list(labels)
    return intervals(
        {
            name: {
                at: values.flatten(1)[:, place] for at, place in zip(titles, chosen, strict=True)
            }
            for name, values in draws.items()
        },
        reference=reference,
        level=level,
        label=quantity,
    )


def intervals(
    draws: Mapping[str, Mapping[str, Tensor]],
    *,
    reference: str | None = None,
    level: float = 0.9,
    label: str = "",
) -> Figure:
    """Median, 50 % interval and a wider interval of each quantity, one row for each posterior.

    The shaded column is the reference's wider interval.

    :param draws: posterior to quantity to ``(S,)`` draws; a posterior may lack some quantities.
    :param reference: name of the posterior with which the others are compared.
    :param level: probability of the wider interval.
    :param label: label of the horizontal axes, with units.
    :raises ValueError: for no posterior or quantity, an unknown reference, or a level outside
        (0, 1).
    """
    check_posteriors(draws, reference)
    check_level(level)
    names = list(draws)
    quantities = list(dict.fromkeys(key for values in draws.values() for key in values))
    if not quantities:
        raise ValueError("there is no quantity to draw")
    look = styles(draws, reference)
    columns = 1 if len(quantities) == 1 else 2
    figure, axes = panels(
        len(quantities), height=0.55 + 0.24 * len(names), columns=columns, sharey=True
    )
    levels = [(1 - level) / 2, (1 - _INNER) / 2, 0.5, (1 + _INNER) / 2, (1 + level) / 2]
    for axis, quantity in zip(axes, quantities, strict=True):
        for row, name in enumerate(names):
            if quantity not in draws[name]:
                continue
            low, lower, middle, upper, high = np.quantile(array(draws[name][quantity]), levels)
            color = look[name]["color"]
            if name == reference:
                axis.axvspan(low, high, color=BAND, linewidth=0, zorder=0)
            axis.plot([low, high], [row, row], color=color, linewidth=1.2, label=name)
            axis.plot([lower, upper], [row, row], color=color, linewidth=3.5, solid_capstyle="butt")
            axis.plot(middle, row, markersize=7, markeredgecolor="white", **look[name])
        axis.use_sticky_edges = False  # the shaded column may reach farthest
        # titles of neighbors would run into each other: each part has a line of its own
        title(axis, quantity if columns == 1 else quantity.replace(", ", ",\n"))
        axis.grid(visible=False, axis="y")
        axis.xaxis.set_major_locator(MaxNLocator(4))
    for axis in axes[-columns:]:
        axis.set_xlabel(label)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    entries = [
        (
            Line2D([], [], color=GRAY, linewidth=3.5, marker="o"),
            f"median, {100 * _INNER:.0f} % interval",
        ),
        (Line2D([], [], color=GRAY, linewidth=1.2), f"{100 * level:.4g} % interval"),
    ]
    legend_below(figure, entries)
    return figure


def chosen_points(draws: Tensor, count: int = 4) -> list[int]:
    """Positions in the flattened ``(N, ...)``, at evenly spaced ranks of the draws' sd, smallest
    first.

    :param draws: ``(S, N, ...)``.
    :param count: the largest number of positions.
    """
    values = draws.detach().flatten(1).double()
    order = values.std(0, correction=0).argsort(stable=True)
    count = min(count, len(order))
    places = torch.linspace(0, len(order) - 1, count, device="cpu").round().long()
    return order.cpu()[places].tolist()


def point_name(place: int, draws: Tensor, names: Sequence[str] = ()) -> str:
    """Name of a point: "point 17", or "point 17 [2]" for a function with several outputs.

    :param names: names of the N points in place of their numbers.
    """
    row, *index = (int(i) for i in np.unravel_index(place, tuple(draws.shape[1:])))
    name = names[row] if names else f"point {row}"
    return name if draws[0, 0].numel() == 1 else f"{name} [{', '.join(map(str, index))}]"

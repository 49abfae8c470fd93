"""Mean and sd of the function at test points, plotted against the reference's."""

from collections.abc import Mapping

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from pyro_bdl.plots.style import (
    array,
    check_posteriors,
    diagonal,
    legend_below,
    panels,
    styles,
    title,
)

_MAX_POINTS = 400


def function_space(
    draws: Mapping[str, Tensor],
    *,
    reference: str,
    quantity: str = "prediction",
    units: str = "",
) -> Figure:
    """Mean and sd of the function at each test point against those of the reference.

    :param draws: ``(S, N, ...)`` for each posterior. If there are more than 400 numbers at the test
        points, evenly spaced ones are shown.
    :param reference: name of the posterior on the horizontal axis.
    :param quantity: name of the quantity, for the labels.
    :param units: units of the draws, for the labels.
    :raises ValueError: for no other posterior than the reference, or test points that differ in
        shape.
    """
    check_posteriors(draws, reference)
    others = [name for name in draws if name != reference]
    if not others:
        raise ValueError(f"there is no posterior besides the reference {reference!r}")
    for name in others:
        if draws[name].shape[1:] != draws[reference].shape[1:]:
            raise ValueError(
                f"draws[{name!r}] and draws[{reference!r}] must be at the same test points, but "
                f"have shapes {tuple(draws[name].shape)} and {tuple(draws[reference].shape)}"
            )
    look = styles(draws, reference)
    figure, axes = panels(2, height=4.0)
    moments = {name: _moments(values) for name, values in draws.items()}
    unit = f" ({units})" if units else ""
    for axis, index, word in zip(axes, (0, 1), ("mean", "sd"), strict=True):
        at = moments[reference][index]
        for name in others:
            axis.plot(
                at,
                moments[name][index],
                linestyle="none",
                markersize=5,
                markeredgewidth=0,
                alpha=0.55,
                label=name,
                **look[name],
            )
        diagonal(axis)
        title(axis, f"{word} of the {quantity}")
        axis.set_xlabel(f"{reference}{unit}")
        axis.set_ylabel(f"each posterior{unit}")
    legend_below(figure, *axes[0].get_legend_handles_labels())
    return figure


def _moments(values: Tensor) -> tuple[np.ndarray, np.ndarray]:
    flat = values.detach().reshape(values.shape[0], -1)
    if flat.shape[1] > _MAX_POINTS:
        flat = flat[:, torch.linspace(0, flat.shape[1] - 1, _MAX_POINTS, device="cpu").long()]
    flat = flat.double()
    sd = flat.std(0, correction=min(1, flat.shape[0] - 1))
    return array(flat.mean(0)), array(sd)

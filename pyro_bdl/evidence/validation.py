"""Hyperparameters from a validation set: a simple alternative to the evidence."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pyro_bdl.curvature.hyperparameters import restored_on_error
from pyro_bdl.evidence.marginal import read_guide
from pyro_bdl.guides.laplace import LaplaceGuide
from pyro_bdl.predictive.linearized import LinearizedPredictive

DEFAULT_VALUES = tuple(10.0 ** (exponent / 4) for exponent in range(-12, 9))


class Grid(NamedTuple):
    """The result of a grid search.

    :param values: the values of the grid.
    :param scores: the score of each value; higher is better.
    :param best: the chosen value.
    """

    values: tuple[float, ...]
    scores: tuple[float, ...]
    best: float


def tune_on_validation(
    guide: LaplaceGuide,
    *args: Any,
    parameter: str | None = None,
    values: Sequence[float] = DEFAULT_VALUES,
    score: Callable[[LaplaceGuide], float] | None = None,
) -> Grid:
    """Set one hyperparameter to the value of a grid that predicts held-out data best.

    At every value the guide gets the new prior and the score is computed; the MAP is not changed.

    :param guide: a guide of ``laplace_approximation``; in the end it has the best value.
    :param args: the held-out arguments of the program, ``x, y``.
    :param parameter: the hyperparameter's name, or a part of it; by default the only one.
    :param values: the grid, by default 10^-3 to 10^2 in quarter decades.
    :param score: a function of the guide, higher is better; by default the mean log density of the
        held-out data under the linearized predictive.
    :raises ValueError: if the parameter is not found, or not the only one.
    """
    parameters = read_guide(guide).parameters
    model = guide.program_model
    found = [name for name in parameters if parameter is None or parameter in name]
    found = [parameter] if parameter in found else found
    if len(found) != 1:
        raise ValueError(
            f"name one hyperparameter of the program (there are {', '.join(parameters) or 'none'})"
        )
    if not values:
        raise ValueError("values must hold at least one number")

    def log_density(posterior: LaplaceGuide) -> float:
        densities = LinearizedPredictive(model, posterior).log_density(*args)
        return float(torch.stack([value.mean() for value in densities.values()]).sum())

    score = score or log_density
    scores = []
    with restored_on_error(parameters, guide.refresh):
        for value in values:
            _set(guide, found[0], value)
            scores.append(float(score(guide)))
        known = [number for number, found in enumerate(scores) if not math.isnan(found)]
        if not known:
            raise ValueError("the score is NaN at every value of the grid")
        best = float(values[max(known, key=scores.__getitem__)])
        _set(guide, found[0], best)
    return Grid(tuple(map(float, values)), tuple(scores), best)


def _set(guide: LaplaceGuide, name: str, value: float) -> None:
    parameter = read_guide(guide).parameters[name]
    parameter.set(torch.full_like(parameter.value, value))
    guide.refresh()

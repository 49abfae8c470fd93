"""Scores of one posterior's predictions against the test targets."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pyro_bdl import metrics
from pyro_bdl.comparison.held_out import Observation, PredictiveDraws, Test, Units
from pyro_bdl.errors import UnusableDrawsError

LEVELS = {"coverage": 0.9, "coverage_50": 0.5, "coverage_95": 0.95}
Scores = dict[str, Any]


def score_numbers(
    predictive: Any, observation: Observation, parts: Iterable[Test], rows: int, units: Units
) -> tuple[Tensor, Tensor, Scores]:
    """Mean predictions, probability integral transforms and scores of a regression, in the
    target's units.

    :param predictive: a ``Predictive`` or its like.
    :param parts: the test data in parts that bound the memory of their draws.
    :param rows: of all parts.
    """
    site, means, places = observation.site, [], []
    square, nlpd, crps = 0.0, 0.0, 0.0
    inside = torch.zeros(len(LEVELS), dtype=torch.float64, device="cpu")
    for part in parts:
        share = part.rows / rows
        mean = predictive.mean(*part.inputs, None)[site].mean(0)
        y = _fitting(part.y, mean) * units.scale + units.shift
        mean = mean * units.scale + units.shift
        means.append(mean)
        square += share * metrics.rmse(mean, y).item() ** 2
        density = log_likelihood(predictive, site, part)
        nlpd += share * _nlpd(density, y, units)
        drawn = predictive(*part.inputs, None)[site]
        check_draws("predictions", drawn.isnan())
        drawn = drawn * units.scale + units.shift
        crps += share * metrics.crps(drawn, y).item()
        inside += share * metrics.interval_coverage(drawn, y, level=list(LEVELS.values())).cpu()
        places.append(metrics.pit(drawn, y))
    pit = torch.cat(places)
    scores = {"rmse": math.sqrt(square), "nlpd": nlpd, "crps": crps}
    scores |= dict(zip(LEVELS, inside.tolist(), strict=True))
    scores["pit"] = metrics.uniformity(pit).item()
    return torch.cat(means), pit, scores


def score_draws_of_numbers(
    draws: PredictiveDraws, y: Tensor, units: Units
) -> tuple[Tensor, Tensor | None, Scores]:
    """As ``score_numbers``, as far as the draws go; those of the target, where known."""
    known = draws.function if draws.targets is None else draws.targets
    mean = known.mean(0)
    target = _fitting(y, mean) * units.scale + units.shift
    mean = mean * units.scale + units.shift
    scores, pit = {"rmse": metrics.rmse(mean, target).item()}, None
    if draws.log_likelihood is not None:
        scores["nlpd"] = _nlpd(draws.log_likelihood.flatten(1), target, units)
    if draws.targets is not None:
        drawn = draws.targets * units.scale + units.shift
        scores["crps"] = metrics.crps(drawn, target).item()
        levels = metrics.interval_coverage(drawn, target, level=list(LEVELS.values()))
        scores |= dict(zip(LEVELS, levels.tolist(), strict=True))
        pit = metrics.pit(drawn, target)
        scores["pit"] = metrics.uniformity(pit).item()
    return mean, pit, scores


def score_classes(
    predictive: Any, observation: Observation, parts: Iterable[Test], rows: int
) -> tuple[Tensor, Scores]:
    """Mean class probabilities ``(N, C)`` and the scores of a classification."""
    site, means, labels, nlpd = observation.site, [], [], 0.0
    for part in parts:
        mean = predictive.mean(*part.inputs, None)[site]
        check_draws("class probabilities", ~mean.isfinite())
        mean = observation.probabilities(mean).mean(0)
        means.append(mean)
        labels.append(class_labels(part.y, mean))
        density = log_likelihood(predictive, site, part)
        nlpd += _nlpd(density, part.y, Units()) * part.rows / rows
    mean = torch.cat(means)
    return mean, _of_probabilities(mean, torch.cat(labels)) | {"nlpd": nlpd}


def score_draws_of_classes(probabilities: Tensor, y: Tensor) -> tuple[Tensor, Scores]:
    """As ``score_classes``, from draws of the probabilities ``(S, N, C)``."""
    mean = probabilities.mean(0)
    labels = class_labels(y, mean)
    scores = _of_probabilities(mean, labels)
    of_labels = mean.double().gather(-1, labels[:, None])
    return mean, scores | {"nlpd": -of_labels.log().mean().item()}


def log_likelihood(predictive: Any, site: str, data: Test) -> Tensor:
    """log p(y_n | draw), ``(S, N)``; ``(S, 1)`` where one distribution is of all rows.

    :raises UnusableDrawsError: where one is NaN.
    """
    found = predictive.log_likelihood(*data.inputs, data.y)[site]
    check_draws("log likelihoods", found.isnan())
    return found.reshape(len(found), -1)


def check_draws(name: str, bad: Tensor) -> None:
    """:raises UnusableDrawsError: where some of ``bad`` ``(S, ...)`` are true, with the draws."""
    draws = bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist()
    if draws:
        raise UnusableDrawsError(
            f"{len(draws)} of {len(bad)} draws (the first is number {draws[0]}, counted from 0) "
            f"have {name} that are NaN or infinite: leave these draws out, or fit it again"
        )


def class_labels(y: Tensor, probabilities: Tensor) -> Tensor:
    """Targets, class numbers or one-hot rows, as one class number for each row ``(N, C)``."""
    if y.numel() == probabilities.numel() and y.shape[-1:] == probabilities.shape[-1:]:
        y = y.argmax(-1)
    return y.reshape(-1).long()


def _of_probabilities(mean: Tensor, labels: Tensor) -> Scores:
    return {
        "accuracy": metrics.accuracy(mean, labels).item(),
        "brier": metrics.brier(mean, labels).item(),
        "ece": metrics.expected_calibration_error(mean, labels).item(),
        "ace": metrics.adaptive_calibration_error(mean, labels).item(),
    }


def _nlpd(density: Tensor, y: Tensor, units: Units) -> float:
    """A density over y * scale is smaller by the scale, for each number of a target. One of all
    rows is shared out among them."""
    shift = math.log(units.scale) * y.numel() / density.shape[1]
    found = metrics.negative_log_predictive_density(density).item() + shift
    return found / len(y) if density.shape[1] == 1 else found


def _fitting(y: Tensor, mean: Tensor) -> Tensor:
    if y.numel() != mean.numel() or len(y) != len(mean):
        raise ValueError(
            f"y_test has shape {tuple(y.shape)}, but the program predicts {tuple(mean.shape)}"
        )
    return y.reshape(mean.shape)

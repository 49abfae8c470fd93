"""What one posterior says at test inputs: its function, its predictions and their scores."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_bdl import diagnostics, metrics
from pyro_bdl.linearized import LinearizedPredictive, is_linear
from pyro_bdl.modules import evaluation_mode
from pyro_bdl.observation import without_wrappers
from pyro_bdl.posterior import latent_draws
from pyro_bdl.predictive import Predictive
from pyro_bdl.program import leave_open, record
from pyro_bdl.samples import Samples

LEVEL = 0.9
_CLASSES = ("Categorical", "Bernoulli", "OneHotCategorical")
# Draws times numbers per draw that are in memory at once while the test points are scored.
_NUMBERS_AT_ONCE = 2**24
_LEAST_DRAWS = 4


@dataclass(frozen=True)
class Units:
    """The target in its own units is ``y * scale + shift`` for the y that the program knows."""

    scale: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True)
class Test:
    """Test data: the program's arguments before the target, and the target."""

    inputs: tuple[Tensor, ...]
    y: Tensor

    @property
    def rows(self) -> int:
        return len(self.y)

    def part(self, rows: slice | Tensor) -> "Test":
        """Some of the rows."""
        return Test(tuple(x[rows] for x in self.inputs), self.y[rows])


@dataclass(frozen=True)
class Evaluation:
    """One posterior at the test inputs.

    :param task: ``"regression"`` or ``"classification"``.
    :param chains: how many Markov chains the draws are of, one after the other; 1 for a guide.
    :param function: ``(S, N, ...)``, draws of f in the target's units, or of class probabilities,
        at the points that were kept.
    :param mean: ``(N, ...)``, the mean prediction, or the mean class probabilities, at all points.
    :param predictions: ``(S, N)``, draws of the target, noise included, at the points that were
        kept; of classes None.
    :param scores: what the table says of the posterior alone, by key.
    """

    task: str
    chains: int
    function: Tensor
    mean: Tensor
    predictions: Tensor | None
    scores: Mapping[str, float] = field(default_factory=dict)


def evaluate(
    name: str,
    model: Callable,
    posterior: Any,
    test: Test,
    *,
    num_samples: int,
    kept: Tensor,
    units: Units,
) -> Evaluation:
    """Push one set of draws of the posterior through the program, and score them.

    :param name: of the posterior, for messages.
    :param model: a program with one observed site, called with the inputs and the target.
    :param posterior: a guide or ``Samples``, of which all draws are taken.
    :param test: the test data.
    :param num_samples: draws of a guide.
    :param kept: row numbers at which the draws are kept.
    :param units: of the target; of no effect for classes.
    :raises TypeError: where the posterior is neither a guide nor ``Samples``.
    :raises ValueError: where a latent site has no value, the program has no or several observed
        sites, or the targets do not fit the predictions.
    """
    predictive: Any
    if is_linear(posterior):  # a Gauss-Newton posterior is of the linear model
        samples = _as_samples(name, posterior, 1, test)
        predictive = LinearizedPredictive(model, posterior, num_samples)
    else:
        samples = _as_samples(name, posterior, num_samples, test)
        predictive = Predictive(model, samples)
    observation = _observation(name, model, samples, test)
    score = _score_classes if observation.is_class else _score_numbers
    mean, scores = score(predictive, observation, test, units)
    function, predictions = _at(predictive, observation, test.part(kept), units)
    if isinstance(posterior, Samples):
        scores |= convergence(function, posterior)
    task = "classification" if observation.is_class else "regression"
    return Evaluation(task, samples.num_chains, function, mean, predictions, scores)


def convergence(function: Tensor, samples: Samples) -> dict[str, float]:
    """R-hat and ESS of the function at the test points, and the number of divergences.

    Quantities that are constant, such as a probability that rounds to 1, are left out.
    """
    found: dict[str, float] = {}
    if "diverging" in samples.stats:
        found["divergences"] = int(samples.stats["diverging"].sum())
    if samples.num_draws < _LEAST_DRAWS:
        return found
    by_chain = function.reshape(samples.num_chains, samples.num_draws, -1)
    by_chain = by_chain[..., by_chain.flatten(0, 1).std(0) > 0]
    rhat, size = diagnostics.rhat(by_chain), diagnostics.ess(by_chain)
    rhat, size = rhat[~rhat.isnan()], size[~size.isnan()]
    if rhat.numel():
        found["rhat"] = rhat.max().item()
    if size.numel():
        found["ess_min"], found["ess_median"] = size.min().item(), size.median().item()
    return found


# --------------------------------------------------------------------------------- the program


@dataclass(frozen=True)
class _Observation:
    """The observed site and the kind of its distribution."""

    site: str
    kind: str

    @property
    def is_class(self) -> bool:
        return self.kind in _CLASSES


def _as_samples(name: str, posterior: Any, num_samples: int, test: Test) -> Samples:
    """Draws made once, so that every number in the table is of the same ones."""
    if isinstance(posterior, Samples):
        return posterior
    try:
        latents = latent_draws(posterior, num_samples, *test.inputs, None)
    except TypeError as error:
        raise TypeError(f"posterior {name!r}: {error}") from error
    return Samples({site: value[None] for site, value in latents.items()})


@torch.no_grad()
def _observation(name: str, model: Callable, samples: Samples, test: Test) -> _Observation:
    one_draw = {site: value[0, 0] for site, value in samples.latents.items()}
    test = test.part(slice(0, 2))
    with evaluation_mode():
        run = record(model, one_draw, (*test.inputs, test.y), draw=leave_open)
    absent = [site for site, said in run.observed.items() if said.value is None]
    if absent:
        raise ValueError(
            f"posterior {name!r} has no value for the latent site {absent[0]!r} of the program: "
            f"it was fitted to another one"
        )
    if len(run.observed) != 1:
        sites = ", ".join(map(repr, run.observed)) or "none"
        raise ValueError(f"compare needs a program with one observed site, but it has: {sites}")
    ((site, said),) = run.observed.items()
    return _Observation(site, type(without_wrappers(said.distribution)[0]).__name__)


def _at(
    predictive: Predictive, observation: _Observation, test: Test, units: Units
) -> tuple[Tensor, Tensor | None]:
    """Draws of the function and, of a regression, of the target."""
    if observation.is_class:
        mean = predictive.mean(*test.inputs, None)[observation.site]
        return _probabilities(mean, observation), None
    drawn = predictive(*test.inputs, None)
    function = drawn.get("f")
    if function is None or function.shape[1:2] != (test.rows,):
        function = predictive.mean(*test.inputs, None)[observation.site]
    predictions = drawn[observation.site]
    return function * units.scale + units.shift, predictions * units.scale + units.shift


# ------------------------------------------------------------------------------------- scores


def _score_numbers(
    predictive: Predictive, observation: _Observation, test: Test, units: Units
) -> tuple[Tensor, dict[str, float]]:
    """Mean predictions and the scores of a regression, in the target's units."""
    site, means = observation.site, []
    square, nlpd, crps, coverage = 0.0, 0.0, 0.0, 0.0
    for part in _parts(test, predictive):
        share = part.rows / test.rows
        mean = predictive.mean(*part.inputs, None)[site].mean(0)
        y = _fitting(part.y, mean) * units.scale + units.shift
        mean = mean * units.scale + units.shift
        means.append(mean)
        square += share * metrics.rmse(mean, y).item() ** 2
        density = predictive.log_likelihood(*part.inputs, part.y)[site].flatten(1)
        # A density over y * scale is smaller by the scale, for each number of a target.
        nlpd += share * (
            metrics.negative_log_predictive_density(density).item()
            + math.log(units.scale) * y.numel() / density.shape[1]
        )
        drawn = predictive(*part.inputs, None)[site] * units.scale + units.shift
        crps += share * metrics.crps(drawn, y).item()
        coverage += share * metrics.interval_coverage(drawn, y, level=LEVEL).item()
    scores = {"rmse": math.sqrt(square), "nlpd": nlpd, "crps": crps, "coverage": coverage}
    return torch.cat(means), scores


def _score_classes(
    predictive: Predictive, observation: _Observation, test: Test, units: Units
) -> tuple[Tensor, dict[str, float]]:
    """Mean class probabilities ``(N, C)`` and the scores of a classification."""
    site, means, labels, nlpd = observation.site, [], [], 0.0
    for part in _parts(test, predictive):
        mean = _probabilities(predictive.mean(*part.inputs, None)[site], observation).mean(0)
        means.append(mean)
        labels.append(class_labels(part.y, mean))
        density = predictive.log_likelihood(*part.inputs, part.y)[site].flatten(1)
        nlpd += metrics.negative_log_predictive_density(density).item() * part.rows / test.rows
    mean, label = torch.cat(means), torch.cat(labels)
    return mean, {
        "accuracy": metrics.accuracy(mean, label).item(),
        "nlpd": nlpd,
        "brier": metrics.brier(mean, label).item(),
        "ece": metrics.expected_calibration_error(mean, label).item(),
    }


def class_labels(y: Tensor, probabilities: Tensor) -> Tensor:
    """Targets, class numbers or one-hot rows, as one class number for each row ``(N, C)``."""
    if y.numel() == probabilities.numel() and y.shape[-1:] == probabilities.shape[-1:]:
        y = y.argmax(-1)
    return y.reshape(-1).long()


def _probabilities(mean: Tensor, observation: _Observation) -> Tensor:
    """Class probabilities ``(S, N, C)``; several labels in a row count as several points."""
    if observation.kind == "Bernoulli":
        ones = mean.flatten(1)
        return torch.stack([1 - ones, ones], -1)
    return mean.flatten(1, -2)


def _fitting(y: Tensor, mean: Tensor) -> Tensor:
    if y.numel() != mean.numel() or len(y) != len(mean):
        raise ValueError(
            f"y_test has shape {tuple(y.shape)}, but the program predicts {tuple(mean.shape)}"
        )
    return y.reshape(mean.shape)


def _parts(test: Test, predictive: Predictive) -> Iterator[Test]:
    """The test rows in parts that bound the memory of their draws."""
    draws = predictive.num_samples
    if draws is None:
        draws = predictive.posterior.num_chains * predictive.posterior.num_draws
    size = max(1, _NUMBERS_AT_ONCE // (draws * max(1, test.y[0].numel())))
    num_data = _num_data(predictive.model)
    if num_data is not None:
        size = min(size, num_data)  # the program refuses more rows with targets
    for start in range(0, test.rows, size):
        yield test.part(slice(start, start + size))


def _num_data(model: Any) -> int | None:
    while not hasattr(model, "num_data") and hasattr(model, "model"):  # under a handler
        model = model.model
    return getattr(model, "num_data", None)

"""One posterior at test inputs: its function, its predictions and their scores."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bdl import metrics
from pyro_bdl.comparison.convergence import convergence, divergences
from pyro_bdl.comparison.held_out import Observation, PredictiveDraws, Test, Units
from pyro_bdl.comparison.k_fold import KFold
from pyro_bdl.comparison.leave_one_out import LeftOut, leave_one_out, row_of
from pyro_bdl.comparison.metric import PointScores, measure
from pyro_bdl.comparison.program_sites import Subject, draws_of, stated_num_data
from pyro_bdl.comparison.scores import (
    SCORES,
    check_draws,
    known_class_predictions,
    known_predictions,
    log_likelihood,
    predictions,
    score,
)
from pyro_bdl.comparison.several_sites import Together
from pyro_bdl.errors import BdlWarning
from pyro_bdl.metrics import Uncertainty
from pyro_bdl.predictive.linearized import UNKNOWN, LinearizedPredictive, is_linear
from pyro_bdl.predictive.sampled import Predictive
from pyro_bdl.samples import Samples
from pyro_bdl.utils.memory import bytes_at_once
from pyro_bdl.utils.progress import shown

__all__ = ["Evaluation", "Test", "Units", "evaluate", "evaluate_draws"]

# Bytes of the draws in memory at once while the test points are scored: scores hold about ten
# arrays of this size, and bars move on after each part.
_DRAWS_AT_ONCE = 2**25
_LEAST_FOR_RANGE = 40
_OF_WEIGHTS = 2**20  # sets the seed of a linear model's weights apart from that of the noise


@dataclass(frozen=True)
class Evaluation:
    """One posterior at the test inputs.

    :param task: ``"regression"`` or ``"classification"``.
    :param chains: number of Markov chains, whose draws follow each other; 1 for a guide.
    :param function: ``(S, N, ...)``, draws of f in the target's units, or of class probabilities,
        at the kept points.
    :param mean: ``(N, ...)``, the mean prediction, or the mean class probabilities, at all points.
    :param predictions: ``(S, N)``, draws of the target, including noise, at the kept points; None
        for classes.
    :param scores: the numbers that need no reference, by key.
    :param expected: ``(S, N, ...)``, E[y | draw] at the kept points; for regression.
    :param noise: ``(S, N, ...)``, Var[y | draw] at the kept points; for regression.
    :param pit: the probability integral transforms of all test targets; for regression.
    :param loo: leave-one-out on the training data, if these are given, or cross-validation.
    :param loo_by: the kind of draws that leave-one-out has; see ``leave_one_out``.
    :param points: the scores that are means over all test points, with their errors.
    """

    task: str
    chains: int
    function: Tensor
    mean: Tensor
    predictions: Tensor | None
    scores: Mapping[str, float | str] = field(default_factory=dict)
    expected: Tensor | None = None
    noise: Tensor | None = None
    pit: Tensor | None = None
    loo: LeftOut | None = None
    loo_by: str = ""
    points: Mapping[str, PointScores] = field(default_factory=dict)

    @property
    def effective(self) -> float:
        """The number of effective draws: the median ESS of chains; NaN if it is unknown."""
        return float(self.scores.get("ess_median", len(self.function)))

    def moments(self) -> Tensor:
        """Mean and variance of the target given the draw, ``(S, N, ..., 2)``."""
        assert self.expected is not None and self.noise is not None
        return torch.stack([self.expected, self.noise], -1)

    def uncertainty(self) -> Uncertainty | None:
        """Aleatoric and epistemic entropy or variance at the kept points."""
        if self.task == "classification":
            return metrics.entropy_parts(self.function)
        if self.expected is None or self.noise is None:
            return None
        return metrics.variance_parts(self.expected, self.noise)

    def halves(self) -> tuple["Evaluation", "Evaluation"]:
        """Two halves: half of the chains and the other half, or both ends of a single chain."""
        names = ("function", "expected", "noise")
        parts: dict[str, Any] = {
            name: metrics.halves(value, chains=self.chains)
            for name in names
            if (value := getattr(self, name)) is not None
        }
        chains = (1, 1) if self.chains == 1 else (self.chains // 2, -(-self.chains // 2))
        scores = {**self.scores, "ess_median": self.effective / 2}
        first, second = (
            replace(
                self,
                chains=chains[i],
                scores=scores,
                **{name: part[i] for name, part in parts.items()},
            )
            for i in (0, 1)
        )
        return first, second

    def at(self, points: Tensor) -> "Evaluation":
        """The draws at some of the points."""
        names = ("function", "predictions", "expected", "noise")
        held = {name: getattr(self, name) for name in names}
        return replace(
            self, **{n: value[:, points] for n, value in held.items() if value is not None}
        )


def evaluate(
    name: str,
    subject: Subject,
    posterior: Any,
    test: Test,
    *,
    num_samples: int,
    seed: int,
    kept: Tensor,
    units: Units,
    train: Test | None = None,
    ood: tuple[Any, ...] | None = None,
    batch_norm_data: Any = None,
    left_out: KFold | None = None,
    progress: bool | None = None,
) -> Evaluation:
    """Run the program at one set of draws of the posterior, and score the predictions.

    :param name: name of the posterior, for messages.
    :param subject: the program.
    :param posterior: a guide or ``Samples``, whose draws are all used.
    :param test: the test data.
    :param num_samples: draws of a guide.
    :param seed: seed of the draws of a linear model, which all its numbers are about.
    :param kept: numbers of the rows at which draws are kept.
    :param units: units of the target; ignored for classes.
    :param train: the data that the posterior was fitted to, for leave-one-out.
    :param ood: out-of-distribution inputs.
    :param batch_norm_data: see ``Predictive``.
    :param left_out: the posterior's cross-validation, in place of PSIS-LOO.
    :param progress: show bars.
    :raises TypeError: if the posterior is neither a guide nor ``Samples``.
    :raises ValueError: for a posterior of another program, or targets that do not fit the
        predictions.
    :raises UnusableDrawsError: if some of the draws are not finite.
    """
    predictive: Any
    model, observation = subject.model, subject.observation
    linear = is_linear(posterior)  # a Gauss-Newton posterior belongs to the linear model
    if linear and not observation.linear:
        said_of = UNKNOWN.format(kind=observation.kind, posterior=repr(name))
        warnings.warn(said_of, BdlWarning, stacklevel=3)
        linear = False
    if linear:
        samples = draws_of(name, subject, posterior, 1, test)
        predictive = LinearizedPredictive(model, posterior, num_samples, seed=seed + _OF_WEIGHTS)
    else:
        samples = draws_of(name, subject, posterior, num_samples, test)
        predictive = Predictive(model, samples, batch_norm_data=batch_norm_data)
    if subject.several is not None:
        predictive = Together(predictive, subject.several)
    for site, values in samples.flat().items():
        check_draws(f"values of the site {site!r}", ~values.isfinite())
    parts = shown(_parts(test, predictive, observation), f"{name}: scores", progress)
    task = "classification" if observation.is_class else "regression"
    mean, pit, scores, points = score(task, predictions(predictive, observation, parts, units))
    found = _at(predictive, observation, test.part(kept), units, samples.num_chains)
    found = replace(found.at(kept) if test.whole else found, mean=mean, pit=pit, points=points)
    elsewhere = None
    if ood is not None:
        elsewhere = _at(predictive, observation, test.elsewhere(ood), units, samples.num_chains)
    scores |= _scores_at_kept_points(found, elsewhere)
    if isinstance(posterior, Samples):
        function = found.function
        if observation.fixed_mean:  # noisy draws of the target always seem to mix
            function = log_likelihood(predictive, observation.site, test)
        scores |= divergences(posterior) | convergence(function, samples.num_chains)
    loo: LeftOut | None = left_out
    loo_by = ""
    if loo is None and train is not None:
        pieces = _parts(train, predictive, observation)
        by_psis = None
        if observation.why_not_left_out:
            reason = (
                f"{observation.why_not_left_out}: no datum can be left out, and there is no elpd"
            )
            warnings.warn(reason, BdlWarning, stacklevel=3)
        else:
            by_psis = leave_one_out(
                model, posterior, samples, predictive, observation.site, pieces, progress=progress
            )
        if by_psis is not None:
            loo, loo_by = by_psis
            scores |= row_of(by_psis)
    scores |= row_of(left_out)
    return replace(found, scores=scores, loo=loo, loo_by=loo_by)


def evaluate_draws(
    name: str,
    observation: Observation,
    draws: PredictiveDraws,
    test: Test,
    *,
    kept: Tensor,
    units: Units,
) -> Evaluation:
    """Score predictions that come without a posterior, as ``evaluate`` does, as far as possible.

    :param observation: the program's observed site.
    """
    draws.check_rows(name, test.rows)
    if observation.is_class:
        p = draws.function
        if observation.kind == "Bernoulli" and p[0].numel() == test.y.numel():
            p = observation.probabilities(p)
        if p.dim() != 3 or bool(((p.sum(-1) - 1).abs() > 1e-3).any()):
            raise ValueError(
                f"posterior {name!r} must hold class probabilities (draws, points, classes) that "
                f"sum to 1, got shape {tuple(draws.function.shape)}"
            )
        task, known = "classification", known_class_predictions(p, test.y)
        function, targets = p[:, kept], None
    else:
        known = known_predictions(draws, test.y, units, normal=observation.kind == "Normal")
        task, held = "regression", draws.at(kept)
        function = units.of(held.function)
        targets = None if held.targets is None else units.of(held.targets)
    mean, pit, scores, points = score(task, [known])
    found = Evaluation(task, draws.chains, function, mean, targets, pit=pit, points=points)
    scores |= _scores_at_kept_points(found, None)
    if draws.chains > 1:
        scores |= convergence(found.function, draws.chains)
    return replace(found, scores=scores)


def _scores_at_kept_points(found: Evaluation, elsewhere: Evaluation | None) -> dict[str, float]:
    """The scores that need draws at the kept test points.

    :param elsewhere: the evaluation at out-of-distribution inputs.
    """
    inputs: dict[str, tuple[Any, ...]] = {}
    parts = found.uncertainty()
    if parts is not None:
        inputs["uncertainty"] = (parts,)
    if found.predictions is not None and len(found.predictions) >= _LEAST_FOR_RANGE:
        inputs["coverage range"] = tuple(metrics.coverage_range(found.predictions).tolist())
    there = None if elsewhere is None else elsewhere.uncertainty()
    if parts is not None and there is not None:
        inputs["ood"] = parts, there
    return measure(SCORES, found.task, inputs)


# ------------------------------------------------------------------------------------- helpers


def _at(
    predictive: Any, observation: Observation, data: Test, units: Units, chains: int
) -> Evaluation:
    """Draws of the function and, for regression, of the target, with its moments."""
    if observation.is_class:
        mean = predictive.mean(*data.asked())[observation.site]
        p = observation.probabilities(mean)
        return Evaluation("classification", chains, p, p.mean(0), None)
    if observation.mixed:
        mean = predictive.mean(*data.asked())[observation.site]
        return Evaluation("regression", chains, mean, mean.mean(0), None)
    drawn = predictive(*data.asked())
    expected, noise = predictive.draw_moments(*data.asked())[observation.site]
    function = drawn.get("f")
    if function is None or function.shape[1:2] != (data.rows,):
        function = drawn[observation.site] if observation.fixed_mean else expected
    bad = ~function.isfinite()
    check_draws("functions", bad & ~bad.all(0))  # all bad: there is no mean
    return Evaluation(
        task="regression",
        chains=chains,
        function=units.of(function),
        mean=units.of(expected.mean(0)),
        predictions=units.of(drawn[observation.site]),
        expected=units.of(expected),
        noise=noise * units.scale**2,
    )


def _parts(test: Test, predictive: Any, observation: Observation) -> list[Test]:
    """The test rows in batches that limit memory; a joint observation needs all rows at once."""
    if observation.joint or test.whole:
        return [test]
    draws = predictive.num_samples
    if draws is None:
        draws = predictive.posterior.num_chains * predictive.posterior.num_draws
    row = 8 * draws * max(1, test.y[0].numel())
    size = max(1, bytes_at_once(_DRAWS_AT_ONCE) // row)
    most = stated_num_data(predictive.model)
    if most is not None:
        size = min(size, most)  # the program accepts no more rows with targets
    return [test.part(slice(start, start + size)) for start in range(0, test.rows, size)]

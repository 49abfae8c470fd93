"""Scores of one posterior: the metrics on test data, and the predictions that they use.

What masks leave out of the likelihood was not seen. A row of which nothing was seen is no test
point, here and in all else; of other rows the scores are over the numbers that were seen.

A metric names its inputs by ``of``:

======================  =========================================================================
``"mean"``              the mean prediction ``(N, ...)`` and the targets; of classes the mean
                        probabilities ``(N, C)`` and the class numbers ``(N,)``
``"ordered"``           the mean probabilities of ordered classes ``(N, C)`` and their numbers
``"draws"``             draws of the target ``(S, N, ...)``, noise included, and the targets
                        ``(N, ...)``; where the prediction is a mixture of few Normals, or one in
                        closed form, ``Normals`` in place of the draws
``"density"``           log p(y_n | draw) ``(S, N)`` and the number of rows
``"log predictive"``    log p(y_n), its mean over the draws or in closed form ``(N,)``, and the
                        number of rows
``"bounds"``            draws of the target ``(S, N)`` and, of targets that may be censored, the two
                        ends between which each is known to lie
``"moments"``           mean and variance of the predictions of a Normal observation, ``(N, ...)``
                        each, and the targets
``"temperature"``       T of the best likelihood, and its standard error
``"halves"``            of classes and Normal observations, at 20 points or more, mean and variance
                        of the predictions, ``(N, ...)`` each, and the targets; of classes the log
                        of the mean probabilities and None for the variance
``"pit"``               the probability integral transforms ``(N, ...)``
``"coverage range"``    both ends of the range of the coverage at 90 %
``"uncertainty"``       the parts of the uncertainty, an ``Uncertainty``, of a batch
``"ood"``               the ``Uncertainty`` at test inputs and at inputs from elsewhere
``"labels"``            as ``"mean"``, of classes, at all points
======================  =========================================================================

``"draws"``, ``"density"`` and ``"uncertainty"`` are known of one batch of test data at a time,
since they need much memory: their metrics are means over the test points (``over_points``); those
of ``"halves"`` and ``"labels"`` are such means too, of all points at once, and AUROC is one over
the points of both kinds. What is no mean, ``over_points="whole"``, gets its errors by the
jackknife. Numbers are in the target's units.

Means over the test points are computed again without each of ten groups of draws, which gives their
error over the draws: of ``"density"`` and ``"mean"`` at all points, of the others at up to 100 of
each batch, since the draws of the function are common to all points.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from pyro_bdl import metrics
from pyro_bdl.comparison.columns import listed
from pyro_bdl.comparison.kind import Kind
from pyro_bdl.comparison.metric import (
    CLASSES,
    NUMBERS,
    WHOLE,
    Metric,
    PointScores,
    measure_points,
    metric,
    metrics_of,
    of_task,
    standard_error_of_mean,
)
from pyro_bdl.comparison.observe import Block
from pyro_bdl.metrics.calibration import (
    calibration_error_by_chance,
    mean_confidence,
    uniformity,
    uniformity_by_chance,
)
from pyro_bdl.metrics.scores import (
    crps_of_normals,
    effective_draws,
    log_predictive_density,
    squared_error,
)
from pyro_bdl.metrics.temperature import best_temperature, calibrated_nlpd
from pyro_bdl.metrics.uncertainty import Uncertainty, placements
from pyro_bdl.utils.jackknife import number_of_groups, without_each
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.random_state import seeded

# Below this many effective draws the density of a mixture says more about their number.
FEW_DRAWS = 10
_LEAST_FOR_HALVES = 20  # test points
_BY_NUMBER = (
    "mean",
    "ordered",
    "draws",
    "bounds",
    "moments",
    "uncertainty",
)  # have a value for each number of a target
_AT_ALL = ("halves", "labels")  # need all points at once
_OF_DRAWS = {"draws", "bounds"}
_AT_SOME = _OF_DRAWS | {"uncertainty"}
_OF_DATA = {"density", "log predictive"}
_OF_ALL = {"log mean", "mean", "variance", "y", "seen"}
_MOST_POINTS = 100  # of a batch, for errors over draws that would take long at all of them

TEST_DATA, CALIBRATION = "test data", "calibration"
whole = partial(metric, group=TEST_DATA)
score = partial(metric, group=TEST_DATA, over_points="mean")
share = partial(metric, over_points="share", style="percent")
calibration = partial(metric, group=CALIBRATION, detail=True)
uncertainty = partial(metric, group="uncertainty", detail=True)


# ------------------------------------------------------------------------------------ test data


@whole("RMSE", "mean", task=NUMBERS, over_points="root")
def rmse(mean: Tensor, y: Tensor) -> Tensor:
    """Root mean square error of the mean, in units of the target."""
    return squared_error(mean, y)


@share("accuracy", "mean", group=TEST_DATA, task=CLASSES)
def accuracy(mean: Tensor, y: Tensor) -> Tensor:
    """Share of the classes predicted correctly."""
    return metrics.accuracy(mean, y, pointwise=True)


@score("NLPD", "log predictive")
def nlpd(log_predictive: Tensor, rows: int) -> Tensor:
    """Negative log predictive density per datum, in nats; smaller is better. Of a Laplace
    approximation with Normal noise it is in closed form."""
    return _per_row(-log_predictive, rows)


@score("NLPD, Normal", "moments", task=NUMBERS, detail=True)
def nlpd_normal(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """Negative log density of the targets under the Normal with the predictive mean and variance,
    in nats. It rests on all draws, where the density of their mixture rests on the few that pass
    near the target (see NLPD by few)."""
    return metrics.gaussian_nlpd(mean, variance, y)


@score("NLPD, calibrated", "halves")
def nlpd_calibrated(mean: Tensor, variance: Tensor | None, y: Tensor) -> Tensor:
    """NLPD after temperature scaling, in nats: of class probabilities to the power 1 / T, and of
    the Normal with the predictive mean and T times the predictive variance. T has the best
    likelihood on a random half of the test points and is used for the other half, and the other way
    round. It compares posteriors each at its best temperature (Ashukha et al. 2020)."""
    return calibrated_nlpd(mean, variance, y)


class Normals(NamedTuple):
    """A prediction that is the mixture of S Normals, of mean and sd ``(S, N, ...)``."""

    mean: Tensor
    sd: Tensor

    def pit(self, y: Tensor) -> Tensor:
        """P(Y < y), as y."""
        return torch.special.ndtr((double(y) - double(self.mean)) / double(self.sd)).mean(0)


@score("CRPS", "draws", task=NUMBERS)
def crps(draws: Tensor | Normals, y: Tensor) -> Tensor:
    """Continuous ranked probability score, in units of the target; smaller is better."""
    if isinstance(draws, Normals):
        return crps_of_normals(double(draws.mean), double(draws.sd), double(y))
    return metrics.crps(draws, y, pointwise=True)


@score("CRPS, censored", "bounds", task=NUMBERS)
def crps_censored(draws: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """CRPS of targets of which some are known within limits only, in units of the target: what is
    predicted within the limits costs nothing. It is no proper score, predictions of events that
    are too early can have a lower one (Rindt et al. 2022); NLPD is one, and decides."""
    return metrics.crps(draws, low, upper=high, pointwise=True)


def _coverage(key: str, percent: int, group: str = CALIBRATION) -> Metric:
    help = (
        f"Share of the targets inside the central {percent} % interval, noise included; less is "
        "overconfident about the targets."
    )

    def inside(draws: Tensor | Normals, y: Tensor) -> Tensor:
        if isinstance(draws, Normals):
            return double((2 * draws.pit(y) - 1).abs() <= percent / 100)
        return metrics.interval_coverage(draws, y, level=percent / 100, pointwise=True)

    return Metric(
        key, f"in {percent} %", help, inside, "draws", group, group == CALIBRATION, NUMBERS,
        style="percent", over_points="share",
    )  # fmt: skip


coverage = _coverage("coverage", 90, TEST_DATA)


@score("Brier", "mean", task=CLASSES)
def brier(mean: Tensor, y: Tensor) -> Tensor:
    """Squared error of the class probabilities, from 0 (best) to 2."""
    return metrics.brier(mean, y, pointwise=True)


@score("RPS", "ordered", task=CLASSES)
def ranked_probability_score(mean: Tensor, y: Tensor) -> Tensor:
    """Ranked probability score of ordered classes: squared error of the cumulative probabilities,
    from 0 (best) to the number of classes minus 1; classes further off cost more."""
    return metrics.ranked_probability_score(mean, y, pointwise=True)


@score("ECE", "labels", task=CLASSES, style="percent")
def ece(mean: Tensor, y: Tensor) -> Tensor:
    """Expected calibration error, in 15 bins: how far confidence is from accuracy. Calibrated
    probabilities have one by chance too, which is part of its error."""
    return metrics.expected_calibration_error(mean, y, pointwise=True)


# ---------------------------------------------------------------------------------- calibration


@share("NLPD by few", "density", group=CALIBRATION, detail=True)
def nlpd_few(density: Tensor, rows: int) -> Tensor:
    """Share of the test points at which NLPD rests on fewer than 10 effective draws."""
    return double(effective_draws(density) < FEW_DRAWS)


coverage_50 = _coverage("coverage_50", 50)


@calibration("90 % from", "coverage range", task=NUMBERS, style="percent")
def coverage_from(low: float, high: float) -> float:
    """The coverage of the 90 % interval is less than this with probability 2.5 % if the targets
    follow from one of the posterior's functions, and then the interval is correct."""
    return low


@calibration("90 % to", "coverage range", task=NUMBERS, style="percent")
def coverage_to(low: float, high: float) -> float:
    """Likewise, the coverage is more than this with probability 2.5 %."""
    return high


coverage_95 = _coverage("coverage_95", 95)


@calibration("PIT", "pit", task=NUMBERS, over_points=WHOLE)
def pit(transforms: Tensor) -> Tensor:
    """Kolmogorov-Smirnov distance of the probability integral transforms from uniform; for a
    calibrated posterior and N independent targets it is above 1.36 / sqrt(N) with probability
    5 %. What such a one has by chance is part of its error."""
    return uniformity(transforms)


@calibration("adaptive ECE", "labels", task=CLASSES, style="percent", over_points=WHOLE)
def ace(mean: Tensor, y: Tensor) -> Tensor:
    """Calibration error in 15 bins that hold equally many test points; calibrated probabilities
    have one by chance too, which is part of its error."""
    return metrics.adaptive_calibration_error(mean, y)


@calibration("confidence", "mean", task=CLASSES, style="percent", over_points="mean")
def confidence(mean: Tensor, y: Tensor) -> Tensor:
    """Mean probability of the predicted class; the accuracy if calibrated."""
    return mean_confidence(mean, pointwise=True)


@calibration("temperature", "temperature", error=True)
def temperature(value: float, error: float) -> tuple[float, float]:
    """T of the best likelihood on the test data: class probabilities to the power 1 / T, or T times
    the predictive variance; above 1 the posterior is overconfident. With its standard error, over
    the test points and over the draws."""
    return value, error


@calibration("mean NLL", "density", over_points="mean")
def expected_nll(density: Tensor, rows: int) -> Tensor:
    """Negative log likelihood per datum of a single draw, averaged over the draws, in nats; NLPD is
    that of their mean, and never larger."""
    return _per_row(metrics.expected_negative_log_likelihood(density, pointwise=True), rows)


# ---------------------------------------------------------------------------------- uncertainty


@uncertainty("aleatoric", "uncertainty", task=NUMBERS, key="aleatoric", over_points="root")
def noise_sd(parts: Uncertainty) -> Tensor:
    """The sd of the noise, root mean square over the test points, in units of the target."""
    return parts.aleatoric


@uncertainty("aleatoric", "uncertainty", task=CLASSES, over_points="mean")
def aleatoric(parts: Uncertainty) -> Tensor:
    """Mean entropy of the classes given the weights, in nats."""
    return parts.aleatoric


@uncertainty("epistemic", "uncertainty", task=NUMBERS, key="epistemic", over_points="root")
def function_sd(parts: Uncertainty) -> Tensor:
    """The sd of the mean prediction over the posterior, root mean square over the test points, in
    units of the target. The squares of both terms sum to the variance."""
    return parts.epistemic


@uncertainty("epistemic", "uncertainty", task=CLASSES, over_points="mean")
def epistemic(parts: Uncertainty) -> Tensor:
    """Mutual information of class and weights, in nats; both terms sum to the entropy."""
    return parts.epistemic


@uncertainty("OOD entropy", "ood", task=CLASSES, over_points="mean")
def ood_entropy(here: Uncertainty, there: Uncertainty) -> Tensor:
    """Mean entropy of the predictive class distribution at out-of-distribution inputs, in nats."""
    return there.total


@uncertainty("AUROC", "ood", over_points="mean", detail=False)  # it was asked for
def auroc(here: Uncertainty, there: Uncertainty) -> Tensor:
    """Probability that the predictive uncertainty is higher at an out-of-distribution input than at
    a test input; 0.5 means no separation."""
    return _over_both(here.total, there.total)


@uncertainty("AUPR", "ood", over_points=WHOLE)
def aupr(here: Uncertainty, there: Uncertainty) -> Tensor:
    """Area under the precision-recall curve of the predictive uncertainty, with out-of-distribution
    inputs as the positives; their share among all inputs means no separation."""
    return metrics.aupr(here.total, there.total)


@uncertainty("FPR at 95 %", "ood", style="percent", over_points=WHOLE)
def fpr95(here: Uncertainty, there: Uncertainty) -> Tensor:
    """Share of the test inputs with a predictive uncertainty that at least 95 % of the
    out-of-distribution inputs reach; smaller is better."""
    return metrics.fpr95(here.total, there.total)


@uncertainty("epist. AUROC", "ood", over_points="mean")
def auroc_epistemic(here: Uncertainty, there: Uncertainty) -> Tensor:
    """AUROC of the epistemic uncertainty, the disagreement of the draws."""
    return _over_both(here.epistemic, there.epistemic)


@uncertainty("AURC", "labels", task=CLASSES, over_points=WHOLE)
def aurc(mean: Tensor, y: Tensor) -> Tensor:
    """Area under the risk-coverage curve: the share of errors among the surest points, by the
    probability of the predicted class, averaged over how many are taken; smaller is better."""
    confidence, predicted = mean.max(-1)
    return metrics.aurc(-confidence, predicted != y)


SCORES = metrics_of(globals())


def _per_row(values: Tensor, rows: int) -> Tensor:
    """A joint density of all rows, divided by their number."""
    return values / rows if len(values) == 1 else values


# --------------------------------------------------------------------- inputs of two kinds


def _over_both(here: Tensor, there: Tensor) -> Tensor:
    """Values ``(N + M,)`` whose mean is the AUROC and whose spread is its influence, at N test
    points and M others: A + (N + M) / N (a_n - A) of the placements a_n of one kind, and M likewise
    (DeLong et al. 1988). The numbers of a target are averaged."""
    kinds = _placed(here, there)
    area, count = kinds[1].mean(), len(here) + len(there)
    return torch.cat([area + count / len(kind) * (kind - area) for kind in kinds])


def with_ends(parts: Uncertainty) -> Tensor:
    """The total ``(N, ...)`` with two more points below all others and two above."""
    total = parts.total
    two = torch.full_like(total[:1], torch.inf).expand(2, *total.shape[1:])
    return torch.cat([total, two, -two])


def _placed(here: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """The placements of each point."""
    of_numbers = placements(here, there)
    first, second = (
        part.reshape(len(kind), -1).mean(1)
        for part, kind in zip(of_numbers, (here, there), strict=True)
    )
    return first, second


def separation(
    here: Block, there: Block, task: str, *, are_draws: bool = True
) -> dict[str, PointScores]:
    """How well uncertainty separates inputs from elsewhere from test inputs, with its errors over
    the points of both kinds and over the draws. As of shares, two points are added to each kind
    that are placed right and two that are not.

    :param here: at the test inputs; ``there`` at the others, at the same draws.
    :param are_draws: whether the predictions are of draws, which could be others.
    """
    views = [here.draw_numbers, *_groups_of(here, are_draws)]
    if task != CLASSES and here.noise is None:
        return {}
    parts: list[list[Any]] = [
        [side.at_draws(view).uncertainty(task) for side in (here, there)] for view in views
    ]
    found = {}
    for other in (ood_entropy,) if task == CLASSES else ():
        values = torch.stack([other.function(*sides) for sides in parts])
        found[other.key] = PointScores.of(other, values[0], values if are_draws else None)
    ended = [Uncertainty(ends, torch.zeros_like(ends)) for ends in map(with_ends, parts[0])]
    for other in (aupr, fpr95):
        drawn = parts if are_draws else None
        found[other.key] = PointScores.of_whole(other, parts[0], drawn, with_ends=ended)
    several = len(here.mean) > 1  # one prediction cannot disagree with itself
    for area, name in ((auroc, "total"), (auroc_epistemic, "epistemic"))[: 1 + several]:
        both = [[getattr(part, name) for part in sides] for sides in parts]
        values = torch.stack([_over_both(*sides) for sides in both])
        ends = values.new_tensor([0.0, 0.0, 1.0, 1.0])
        errors = (standard_error_of_mean(torch.cat([kind, ends])) for kind in _placed(*both[0]))
        found[area.key] = replace(
            PointScores.of(area, values[0], values if are_draws else None),
            over_points=math.hypot(*errors),
        )
    return found


def _groups_of(block: Block, are_draws: bool) -> Iterator[Tensor]:
    """The draws of a block without each of some groups of them, where they could be others."""
    groups = number_of_groups(len(block.mean)) if are_draws else 0
    return without_each(block.draw_numbers, groups) if groups else iter(())


# -------------------------------------------------------------------------------- of predictions


class Score:
    """The scores of predictions that come batch by batch.

    :param kind: what the program observes.
    :param are_draws: whether the predictions are of draws, which could be others; if not, they are
        in equal parts the whole prediction, which then has no error over draws.
    """

    def __init__(self, kind: Kind, *, are_draws: bool = True) -> None:
        self.kind, self.are_draws, self._rows = kind, are_draws, 0
        self._parts: dict[str, list[Tensor]] = {}
        self._groups: dict[str, list[Tensor]] = {}

    def add(self, block: Block) -> None:
        """Score a batch."""
        parts, inputs = self._read(block)
        seen = parts.get("seen")
        for name in _OF_DRAWS & inputs.keys():
            parts["transforms"] = _transforms(*inputs[name])
        if (uncertainty := self._uncertainty(block, slice(None))) is not None:
            inputs["uncertainty"] = (uncertainty,)
        parts |= measure_points(SCORES, self.kind.task, inputs, seen)
        parts |= {n: self._rows + owners for n, owners in _owners(block, self.kind.task).items()}
        self._rows += block.rows
        for name, values in parts.items():
            self._parts.setdefault(name, []).append(values)
        if not self.are_draws or (block.y is None and block.log_density is None):
            return
        for name, several in self._of_groups(block).items():
            self._groups.setdefault(name, []).append(several)

    def _read(self, block: Block) -> tuple[dict[str, Tensor], dict[str, tuple]]:
        """The predictions at each point of a batch, and the inputs of metrics."""
        closed, y, seen = block.closed, block.y, block.seen
        mean = block.mean.mean(0) if closed is None else closed.mean
        parts, inputs = {"mean": mean}, cast(dict[str, tuple], {})
        logs = block.log_mean
        if seen is not None and self.kind.task == CLASSES:  # each label is a point
            mean, y = mean[seen], None if y is None else y[seen]
            logs = None if logs is None else logs[seen]
            seen, parts["labeled mean"] = None, mean
        if logs is not None:
            parts["log mean"] = logs
        if seen is not None:
            parts["seen"] = seen
            parts["weights"] = double(seen.reshape(len(seen), -1)).sum(1)
        if y is not None:
            parts["y"] = y
        if self.kind.may_be_censored:
            y = None
        if y is not None:
            inputs["mean"] = mean, y
            if self.kind.has_ordered_classes:
                inputs["ordered"] = mean, y
        if block.log_density is not None:
            inputs["density"] = block.log_density, block.rows
            log_predictive = None if closed is None else closed.log_density
            if log_predictive is None:
                log_predictive = log_predictive_density(block.log_density)
            inputs["log predictive"] = log_predictive, block.rows
        if block.draws is not None and y is not None:
            draws: Tensor | Normals = block.draws
            if self.kind.is_normal and closed is not None:
                draws = Normals(closed.mean[None], closed.variance.sqrt()[None])
            elif self.kind.is_normal and not self.are_draws and block.noise is not None:
                draws = Normals(block.mean, block.noise.sqrt())
            inputs["draws"] = draws, y
        if block.draws is not None and block.bounds is not None:
            inputs["bounds"] = block.draws, *block.bounds
        if closed is not None:
            parts["variance"] = closed.variance
        elif block.noise is not None:
            variance = metrics.variance_parts(block.mean, block.noise).total
            parts["variance"] = variance.reshape(mean.shape)
        elif block.draws is not None:
            parts["variance"] = double(block.draws).var(0)
        if self.kind.is_normal and "variance" in parts and y is not None:
            inputs["moments"] = mean, parts["variance"], y
        return parts, inputs

    def _uncertainty(self, block: Block, some: slice) -> Uncertainty | None:
        """The parts of the uncertainty at some points; of labels, those that were seen."""
        noise = None if block.noise is None else block.noise[:, some]
        found = replace(block, mean=block.mean[:, some], noise=noise).uncertainty(self.kind.task)
        if found is None or block.seen is None or self.kind.task != CLASSES:
            return found
        return Uncertainty(*(part[block.seen[some]] for part in found))

    def _of_groups(self, block: Block) -> dict[str, Tensor]:
        """The values ``(1 + G, n)`` of metrics with all draws, and without each group of them, and
        what ``"halves"`` takes, at some of the points."""
        several: dict[str, list[Tensor]] = {}
        for view in (block.draw_numbers, *_groups_of(block, self.are_draws)):
            viewed = block.at_draws(view)
            parts, inputs = self._read(viewed)
            seen = parts.get("seen")
            some = slice(None, None, -(-len(parts["mean"]) // _MOST_POINTS))
            at_some = None if seen is None else seen[some]
            values: dict[str, Tensor] = {}
            for name in _OF_DRAWS & inputs.keys():
                draws, *ends = inputs.pop(name)
                exact = isinstance(draws, Normals)
                few = Normals(*(part[:, some] for part in draws)) if exact else draws[:, some]
                thinned = {name: (few, *(end[some] for end in ends))}
                values |= measure_points(SCORES, self.kind.task, thinned, at_some)
                with seeded(0):  # the places of equal numbers are the same in all views
                    values["transforms"] = _transforms(*thinned[name])
            if (uncertainty := self._uncertainty(viewed, some)) is not None:
                thinned = {"uncertainty": (uncertainty,)}
                values |= measure_points(SCORES, self.kind.task, thinned, at_some)
            values |= measure_points(SCORES, self.kind.task, inputs, seen)
            for name in _OF_ALL & parts.keys():
                values[name] = parts[name][some]
            if "labeled mean" in parts:
                values["mean"] = parts["labeled mean"][some]
            if "weights" in parts:
                values["weights"], values["weights of some"] = (
                    parts["weights"], parts["weights"][some]
                )  # fmt: skip
            for name, value in values.items():
                several.setdefault(name, []).append(value)
        return {name: torch.stack(values) for name, values in several.items()}

    def whole(self) -> dict[str, Tensor]:
        """The ``"mean"`` predictions at all test points and, if they are known, their
        ``"variance"``, the targets ``"y"`` and their ``"transforms"``; also the values of metrics
        by key."""
        return {name: torch.cat(parts) for name, parts in self._parts.items()}

    def of_seen(self) -> dict[str, Tensor]:
        """The same of the numbers that were seen, in a row where single ones of a target were
        not; of the labels that were seen."""
        whole = self.whole()
        if "labeled mean" in whole:
            return whole | {"mean": whole["labeled mean"]}
        return _of_seen(whole)

    def inputs(self) -> dict[str, tuple]:
        """The inputs of metrics that need all test points at once."""
        inputs = self._inputs_of(self.of_seen())
        if (whole := self._predictions(self.of_seen())) is not None:
            value, error = best_temperature(*whole)
            parts = (self._predictions(view) for view in self._views())
            several = torch.tensor(
                [best_temperature(*part)[0] for part in parts if part],
                dtype=torch.float64, device="cpu",
            )  # fmt: skip
            groups = several[1:] - several[:1] if self.are_draws else several.new_zeros(1)
            found = PointScores(value, error, several.new_empty(0), groups)
            inputs["temperature"] = value, found.error
        return inputs

    def _views(self) -> list[dict[str, Tensor]]:
        """The predictions at some points, of all draws and without each group of them."""
        names = {*_OF_ALL, "transforms"} & self._groups.keys()
        groups = {n: torch.cat(self._groups[n], 1) for n in names}
        count = len(groups["mean"]) if "mean" in groups else 0
        return [
            _of_seen({name: values[g] for name, values in groups.items()}) for g in range(count)
        ]

    def _predictions(self, whole: Mapping[str, Tensor]) -> tuple | None:
        """Mean, variance and targets, where there are such."""
        classes = self.kind.task == CLASSES
        if "y" not in whole or self.kind.may_be_censored or not (classes or "variance" in whole):
            return None
        return whole["log mean" if classes else "mean"], whole.get("variance"), whole["y"]

    def _inputs_of(self, whole: Mapping[str, Tensor]) -> dict[str, tuple]:
        classes = self.kind.task == CLASSES
        inputs = cast(dict[str, tuple], {})
        if "transforms" in whole:
            inputs["pit"] = (whole["transforms"],)
        if "y" not in whole or self.kind.may_be_censored:
            return inputs
        inputs["mean"] = whole["mean"], whole["y"]
        enough = len(whole["y"]) >= _LEAST_FOR_HALVES and (classes or self.kind.is_normal)
        if enough and (predictions := self._predictions(whole)) is not None:
            inputs["halves"] = predictions
        if classes:
            inputs["labels"] = inputs["mean"]
        return inputs

    def points(self) -> dict[str, PointScores]:
        """The scores that are means over the test points."""
        known, whole = of_task(SCORES, self.kind.task), self.whole()
        groups = {name: torch.cat(parts, 1) for name, parts in self._groups.items()}
        whole |= self._at_all(self.of_seen())
        if views := [self._at_all(view) for view in self._views()]:
            groups |= {key: torch.stack([view[key] for view in views]) for key in views[0]}
        # Without a group the error over draws is unknown, and without draws there is none.
        none = torch.zeros(1, 1, device="cpu") if self.are_draws else None

        def scores(metric: Metric) -> PointScores:
            values, several = whole[metric.key], groups.get(metric.key, none)
            owners = whole.get("owners of data" if metric.of in _OF_DATA else "owners of labels")
            if owners is not None and len(owners) > self._rows:  # the rows are what was sampled
                counts = double(owners.bincount())
                sums = torch.zeros_like(counts).index_add_(0, owners, values)
                return PointScores.of(metric, sums / counts, several, counts)
            if metric.of not in _BY_NUMBER or "weights" not in whole:
                return PointScores.of(metric, values, several)
            if several is none:
                return PointScores.of(metric, values, several, whole["weights"])
            of_some = groups["weights of some" if metric.of in _AT_SOME else "weights"][0]
            return PointScores.of(metric, values, several, whole["weights"], of_some)

        found = {metric.key: scores(metric) for metric in known if metric.key in whole}
        inputs = self._inputs_of(self.of_seen())
        several = [self._inputs_of(view) for view in self._views()]
        for one in known:
            if one.over_points == WHOLE and one.of in inputs:
                drawn = [view[one.of] for view in several if one.of in view]
                found[one.key] = PointScores.of_whole(
                    one, inputs[one.of], drawn if self.are_draws else None, self._rows_of(one.of)
                )
        for key, chance in self._by_chance(found.keys()).items():
            own = found[key]
            found[key] = replace(own, over_points=math.hypot(own.over_points, chance))
        return found

    def _by_chance(self, known: Collection[str]) -> dict[str, float]:
        """The mean of some scores by chance, of predictions that are right."""
        chance, whole = {}, self.of_seen()
        if pit.key in known:
            chance[pit.key] = uniformity_by_chance(whole["transforms"].numel())
        if ece.key in known:
            chance[ece.key] = calibration_error_by_chance(whole["mean"])
        return chance

    def _rows_of(self, name: str) -> Tensor | None:
        """The row of each point of an input; None where rows are points."""
        whole = self.whole()
        if name == "labels":
            return whole.get("owners of labels")
        seen = whole.get("seen")
        return None if seen is None or seen.all() else seen.nonzero()[:, 0]

    def _at_all(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        inputs = self._inputs_of(whole)
        inputs = {name: inputs[name] for name in _AT_ALL if name in inputs}
        return measure_points(SCORES, self.kind.task, inputs)


def _transforms(draws: Tensor | Normals, low: Tensor, high: Tensor | None = None) -> Tensor:
    """The probability integral transforms of targets, or of limits between which they lie."""
    if isinstance(draws, Normals):
        return draws.pit(low)
    return metrics.pit(draws, low, upper=high)


def _owners(block: Block, task: str) -> dict[str, Tensor]:
    """The row of each datum, and of each label that was seen, where rows have several."""
    rows = torch.arange(block.rows, device=block.mean.device)
    found, density = {}, block.log_density
    if density is not None and block.owners is not None:
        found["owners of data"] = block.owners
    elif density is not None and density.shape[1] % block.rows == 0:
        found["owners of data"] = rows.repeat_interleave(density.shape[1] // block.rows)
    if task == CLASSES and block.y is not None:
        labels = rows.repeat_interleave(len(block.y) // block.rows)
        found["owners of labels"] = labels if block.seen is None else labels[block.seen]
    return found


def _of_seen(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Predictions and targets of the numbers that were seen, one after the other where some of a
    target were not."""
    seen = values.get("seen")
    if seen is None or seen.all():
        return values
    names = values.keys() & {"mean", "variance", "y", "transforms"}
    return values | {name: values[name][seen] for name in names}


def differences(evaluation: Any, reference: Any) -> dict[str, float]:
    """The scores minus the reference's at the same test points, as ``key_diff`` and its error."""
    gaps: dict[str, float] = {}
    known = evaluation.points.keys() & reference.points.keys()
    for key in (m.key for m in SCORES if m.group == TEST_DATA and m.key in known):
        gap, error = evaluation.points[key].difference(reference.points[key])
        gaps |= {f"{key}_diff": gap, f"{key}_diff_se": error}
    return gaps


def data_notes(evaluation: Any) -> list[str]:
    """Sentences on test data that no score counts."""
    notes = []
    if evaluation.seen is not None:
        seen, count = evaluation.seen
        notes.append(
            f"Masks leave out {count - seen} of the {count} test targets, which count in no score: "
            f"the scores are of the {seen} that were seen."
        )
    if evaluation.may_be_censored:
        notes.append(
            "The targets may be censored: NLPD and the censored CRPS count each as what is known "
            "of it; RMSE and coverage, which would take the limits for the targets, are left out."
        )
    if evaluation.observed_inputs:
        names = listed([repr(name) for name in evaluation.observed_inputs])
        notes.append(
            f"The observed numbers of {names} are inputs, of which some may be missing, and count "
            "in no score: observed= names the sites that are scored."
        )
    if evaluation.factors:
        names = listed([repr(name) for name in evaluation.factors])
        notes.append(
            f"The likelihood in {'factors' if len(evaluation.factors) > 1 else 'the factor'} "
            f"{names} belongs to no single datum and is not scored: the scores are of the observed "
            "sites."
        )
    return notes

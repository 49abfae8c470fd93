"""The order of posteriors by their distance to the reference, and groups that errors bear out."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyro_bdl import metrics
from pyro_bdl.comparison.evaluation import Evaluation
from pyro_bdl.utils.tables import Column

ALIKE, USABLE, UNDECIDED, FAR, WORSE = "alike", "usable", "undecided", "far", "worse"
REFERENCE = "reference"
# Multiples of standard errors that count as a difference.
ERRORS = 2.0
# A usable posterior is at most this share as far as a point at the reference's mean.
_HALF = 0.5

DISTANCE, SCORE = "wasserstein", "nlpd"

COLUMN = Column(
    "group",
    "group",
    style="text",
    help="alike: cannot be told from the reference, up to the errors of sampling; usable: at most "
    "half as far from it as a point at its mean; far: farther; undecided: the draws are too few to "
    "say. Without a reference, by NLPD, alike: cannot be told from the best; worse: can be.",
)


@dataclass(frozen=True)
class Ranked:
    """One posterior's place.

    :param posterior: its name.
    :param group: ``"alike"``, ``"usable"``, ``"undecided"`` or ``"far"``; without a reference
        ``"alike"``, ``"worse"`` or, if errors are unknown, ``"undecided"``.
    :param distance: the Wasserstein-1 distance of the function's distributions from the reference,
        averaged over the test points, in their units; without a reference the NLPD.
    :param error: its Monte Carlo standard error; of the NLPD the standard error, over the test
        points, of the difference from the best. NaN if unknown.
    :param floor: the distance that an equal posterior would have by the sampling errors of both;
        NaN without a reference.
    :param share: 1 - distance / distance of a point at the reference's mean: 1 for the reference, 0
        for such a point, negative for what is farther; NaN without a reference.
    :param seconds: wall-clock time of the fit; None if unknown.
    :param time: seconds divided by the reference's; None if unknown.
    """

    posterior: str
    group: str
    distance: float
    error: float
    floor: float = math.nan
    share: float = math.nan
    seconds: float | None = None
    time: float | None = None


@dataclass(frozen=True)
class Ranking:
    """The posteriors in order, the closest to the reference first.

    :param by: key of the ranked number in the rows: ``"wasserstein"``, or ``"nlpd"`` without a
        reference.
    :param rows: the places; the reference itself has none.
    :param point: the distance of a point at the reference's mean, the scale of ``share``.
    :param criteria: the criteria of the groups, in words.
    :param score: key of the NLPD that predictions are compared by: ``"nlpd"``, or
        ``"nlpd_normal"`` where the former rests on few draws.
    """

    by: str = DISTANCE
    rows: tuple[Ranked, ...] = ()
    point: float = math.nan
    criteria: str = ""
    score: str = SCORE

    def names(self, *groups: str) -> list[str]:
        """Names of the posteriors in some groups, in order; all without an argument."""
        return [row.posterior for row in self.rows if not groups or row.group in groups]

    def group_of(self, posterior: str) -> str | None:
        """The group of a posterior; None if it has no place, as the reference."""
        return {row.posterior: row.group for row in self.rows}.get(posterior)

    def ordered(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows of the table in this order with their groups; those without a place come first."""
        places = {name: place for place, name in enumerate(self.names())}
        found = sorted(rows, key=lambda row: places.get(row["posterior"], -1))
        without = REFERENCE if self.by == DISTANCE else None
        return [row | {"group": self.group_of(row["posterior"]) or without} for row in found]


def rank_by_distance(
    reference: str,
    rows: Sequence[Mapping[str, Any]],
    evaluations: Mapping[str, Evaluation],
    *,
    score: str = SCORE,
) -> Ranking:
    """Rank posteriors by their Wasserstein-1 distance d to the reference.

    An estimated distance is positive even between equal posteriors. How large it is then follows
    from the distances h between two halves of each one's draws, since distances of samples of n
    draws go with n^(-1/2)::

        floor = 1/2 sqrt(h^2 + h_reference^2)

    With e the Monte Carlo error of d, and d_0 the distance of a point at the reference's mean:

    - alike: d - floor <= 2 e, and floor + 2 e <= d_0 / 2, so that a posterior that is not usable
      would have been seen;
    - usable: d + 2 e <= d_0 / 2; far: d - 2 e > d_0 / 2, and d is above h_reference and above
      floor + 2 e: a posterior nearer than the reference is to itself is not called far;
    - undecided: all others.

    :param reference: its name.
    :param rows: the rows of the table, with the distances.
    :param evaluations: draws of the functions by name.
    :param score: key of the NLPD that predictions are compared by.
    """
    base = evaluations[reference]
    point = _point_distance(base.function)
    of_reference = _half_to_half(base)
    seconds = {row["posterior"]: row.get("seconds") for row in rows}
    found = []
    for row in rows:
        name = row["posterior"]
        if name == reference:
            continue
        distance, error = float(row[DISTANCE]), float(row[f"{DISTANCE}_se"])
        floor = math.hypot(_half_to_half(evaluations[name]), of_reference) / 2
        found.append(
            Ranked(
                posterior=name,
                group=_group(distance, error, floor, of_reference, point),
                distance=distance,
                error=error,
                floor=floor,
                share=1 - distance / point if point > 0 else math.nan,
                seconds=seconds[name],
                time=_ratio(seconds[name], seconds[reference]),
            )
        )
    found.sort(key=lambda row: row.distance)
    return Ranking(
        DISTANCE, tuple(found), point, _BY_DISTANCE.format(reference=in_words(reference)), score
    )


def rank_by_score(
    rows: Sequence[Mapping[str, Any]],
    evaluations: Mapping[str, Evaluation],
    *,
    score: str = SCORE,
) -> Ranking:
    """Rank posteriors by NLPD, where there is no reference; those without an NLPD are left out.

    :param rows: the rows of the table.
    :param evaluations: the posteriors' scores by name.
    :param score: key of the NLPD.
    """
    known = sorted((row for row in rows if score in row), key=lambda row: row[score])
    found = []
    for row in known:
        best, own = (evaluations[at["posterior"]].points[score] for at in (known[0], row))
        gap, error = own.difference(best)
        found.append(
            Ranked(
                posterior=row["posterior"],
                group=_group_of_score(gap, error),
                distance=row[score],
                error=error,
                seconds=row.get("seconds"),
            )
        )
    return Ranking(score, tuple(found), math.nan, _BY_SCORE, score)


def in_words(reference: str) -> str:
    """The name of a reference in a sentence; a shipped one is called so."""
    return "the reference" if reference == REFERENCE else reference


def _group(distance: float, error: float, floor: float, of_reference: float, point: float) -> str:
    slack = ERRORS * (0.0 if math.isnan(error) else error)
    limit = _HALF * point
    if not math.isnan(error) and distance - floor <= slack and floor + slack <= limit:
        return ALIKE
    if distance + slack <= limit:
        return USABLE
    nearest = max(limit, floor)
    return FAR if distance - slack > nearest and distance > of_reference else UNDECIDED


def _group_of_score(gap: float, error: float) -> str:
    if math.isnan(gap + error):
        return UNDECIDED
    return WORSE if gap > ERRORS * error else ALIKE


def _point_distance(function: Tensor) -> float:
    """Wasserstein-1 distance of draws from a point at their mean: their mean absolute deviation."""
    return float(metrics.wasserstein1(function.double().mean(0, keepdim=True), function))


def _half_to_half(evaluation: Evaluation) -> float:
    draws = evaluation.function
    return float(metrics.split_half(draws, metrics.wasserstein1, chains=evaluation.chains))


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


_BY_DISTANCE = (
    "Ranked by the Wasserstein-1 distance of the function to {reference}, averaged over the test "
    "points. Alike: within two standard errors of the distance that an equal posterior would have "
    "by sampling alone. Usable: at most half as far as a point at {reference}'s mean. Far: "
    "farther. Undecided: the draws are too few to say."
)
_BY_SCORE = (
    "Ranked by NLPD on the test data, since there is no reference. Alike: within two standard "
    "errors (of the paired difference over the test points) of the best. Worse: beyond them."
)

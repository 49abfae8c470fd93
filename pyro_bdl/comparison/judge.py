"""Groups, reasons, doubts and the answer in words, as the numbers of a comparison bear them out.

All limits stand in the table below. A difference counts from ``ERRORS`` standard errors on, and
what has an unknown error decides nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyro_bdl.comparison.columns import Column, listed, with_error
from pyro_bdl.comparison.evaluate import Evaluation
from pyro_bdl.comparison.metric import ERRORS


class Row(dict[str, Any]):
    """The numbers of a posterior by key; NaN where they are unknown."""

    def __missing__(self, key: str) -> float:
        return math.nan

    def pair(self, key: str) -> tuple[float, float]:
        """A number and its standard error."""
        return self[key], self[f"{key}_se"]


# The limits. Convergence has its own, by the length of the chains: ``limit_of_rhat``.
NEAR = 0.5  # largest distance of a usable posterior, in distances of a point at the mean
EQUIVALENT = 0.25  # largest distance of posteriors that are alike, likewise
SD = math.log(1.25)  # |log| of an sd ratio that counts as agreement
SD_APART = math.log(1.33)  # by which a region must be worse than near the data to be named
SD_NONE = 1e-3  # sd ratio of a function without spread
MEAN = 0.25  # difference of the means that counts as agreement, in sds of the reference
DIVERGENT = 0.01  # share of divergent draws that puts a reference in doubt
COVERAGE = 0.1  # two standard errors of a coverage, above which it says little
GAMMA_ALL, GAMMA_NONE = 0.9, 0.05  # shares of what the data may determine: nearly all, or none
QUICK = 0.5  # share of the best one's time at which a cheaper posterior is worth a sentence
MOST_NAMES = 3  # in one list of the answer

ALIKE, USABLE, UNDECIDED, FAR, WORSE = "alike", "usable", "undecided", "far", "worse"
REFERENCE = "reference"
DISTANCE, SCORE = "wasserstein", "nlpd"

BY_DISTANCE = (
    "Ranked by the Wasserstein-1 distance of the function to {reference}, averaged over the test "
    "points, in distances of a point at {reference}'s mean. Alike: at most a quarter. Usable: at "
    "most half. Far: more than half. Each with two Monte Carlo errors to spare, so that more draws "
    "never lower a grade. Undecided: the draws are too few to say."
)
BY_SCORE = (
    "Ranked by NLPD on the test data, since there is no reference. Alike: within two standard "
    "errors (of the paired difference, over test points and draws) of the best. Worse: beyond them."
)
COLUMN = Column(
    "group",
    "group",
    style="text",
    help=f"{BY_DISTANCE.format(reference='the reference')} {BY_SCORE}",
)
# The sentences of the answer.
_ALIKE = "{names} {verb} with {whose} up to W1 {bound:.2g} ({scale}{time}."
_CLOSEST = "{begin}{names} {verb} the closest{to}, at W1 {distance} ({resolved}{scale}{time}."
_CHEAPER = "For {time}, {name} is {group}, at W1 {distance:.2g}."
_FAR = "Far from it: {names}."
_UNKNOWN = "How far {names} {verb}, {whose} few effective draws do not say."
_INTERVAL = "its 90 % interval of the target, noise included, holds {:.0f} % of the {}test targets"
_REGIONS = {
    "_between": "between the training data",
    "_beyond": "beyond the training data",
    "": "on average",
}
_LONGER = (
    "longer warm-up and more draws (num_warmup and num_samples of mcmc.sample; --warmup and "
    "--draws of pyro-bdl compare)"
)
_SEVERAL = (
    "several chains, whose agreement R-hat measures (num_chains=4 of mcmc.sample; --chains of "
    "pyro-bdl compare)"
)
_REMEDY = (
    "non-centered hierarchies (LocScaleReparam), smaller steps (target_accept of mcmc.NUTS nearer "
    "1) or a smoother model"
)


class Reason(NamedTuple):
    """A clause on one posterior, and the fault that it finds in a few words; empty for none."""

    words: str
    fault: str = ""


@dataclass(frozen=True)
class Judgment:
    """The group of a posterior and the reasons for it.

    :param group: ``"alike"``, ``"usable"``, ``"undecided"`` or ``"far"``, for the reference
        ``"reference"``; without a reference ``"alike"``, ``"worse"`` or ``"undecided"``.
    :param reasons: what its numbers say, the gravest first.
    """

    group: str
    reasons: tuple[Reason, ...]

    @property
    def verdict(self) -> str:
        """The reasons as one sentence."""
        begin = "the reference: " if self.group == REFERENCE else ""
        return begin + "; ".join(reason.words for reason in self.reasons)

    @property
    def fault(self) -> str:
        """The gravest fault."""
        return next((reason.fault for reason in self.reasons if reason.fault), "other shape")


def judge(
    rows: Mapping[str, Row],
    evaluations: Mapping[str, Evaluation],
    reference: str | None,
    *,
    point: float = math.nan,
) -> dict[str, Judgment]:
    """Groups and reasons of all posteriors, the reference first, then the closest.

    With the distance d to the reference, its Monte Carlo error e, the distance r that draws of an
    equal posterior may have by chance (``resolution``), and the distance d_0 of a point at the
    reference's mean::

        alike: d + 2 e <= d_0 / 4    usable: d + 2 e <= d_0 / 2    far: d > r, d - 2 e > d_0 / 2

    All others are undecided. Without a reference they are ranked by NLPD, and those without one
    stand last.

    :param rows: the numbers of each posterior.
    :param evaluations: the posteriors.
    :param point: d_0.
    """
    base = None if reference is None else rows[reference]
    points = next(iter(evaluations.values())).rows
    key = SCORE if base is None else DISTANCE
    names = sorted(rows, key=lambda name: (name != reference, _or_inf(rows[name][key])))
    judgments = {}
    for name in names:
        if base is None:
            group = _group_by_score(evaluations[name], evaluations[names[0]])
        else:
            group = REFERENCE if name == reference else _group(rows[name], point)
        other = None if name == reference else base
        judgments[name] = Judgment(group, reasons(rows[name], other, points))
    return judgments


def _or_inf(value: float) -> float:
    """A number to sort by: the largest if it is unknown."""
    return math.inf if math.isnan(value) else value


def _group(row: Row, point: float) -> str:
    distance, error = row.pair(DISTANCE)
    if math.isnan(row["resolution"]):
        return UNDECIDED
    for group, limit in ((ALIKE, EQUIVALENT), (USABLE, NEAR)):
        if distance + ERRORS * error <= limit * point:
            return group
    is_far = distance > row["resolution"] and distance - ERRORS * error > NEAR * point
    return FAR if is_far else UNDECIDED


def _group_by_score(evaluation: Evaluation, best: Evaluation) -> str:
    if SCORE not in evaluation.points:
        return UNDECIDED
    gap, error = evaluation.points[SCORE].difference(best.points[SCORE])
    if math.isnan(gap + error):
        return UNDECIDED
    return WORSE if gap > ERRORS * error else ALIKE


def criteria(reference: str | None) -> str:
    """The criteria of the groups, in words."""
    return BY_SCORE if reference is None else BY_DISTANCE.format(reference=in_words(reference))


def in_words(reference: str) -> str:
    """The name of a reference in a sentence; a shipped one is called so."""
    return "the reference" if reference == REFERENCE else reference


def doubts(name: str, row: Row) -> list[str]:
    """A sentence on why a reference is in doubt: its chains disagree or diverge, or are too short
    to say."""
    reason, needed = _convergence(row), []
    if not row["rhat"] <= row["rhat_limit"]:
        needed.append(_SEVERAL if row["num_chains"] == 1 else _LONGER)
    if row["divergent"] > DIVERGENT:
        needed.append(_REMEDY)
    if reason is None or not needed:
        return []
    return [
        f"{name} cannot be trusted as the reference: {reason.words}. Before relying on the "
        f"distances, give it {' and '.join(needed)}."
    ]


# -------------------------------------------------------------------- reasons of one posterior


def reasons(row: Row, reference: Row | None, points: int) -> tuple[Reason, ...]:
    """Reasons against a posterior by its numbers, the gravest first.

    :param row: its numbers.
    :param reference: those of the reference; None without one, and of the reference itself.
    :param points: number of test points.
    """
    clauses = [_coverage(row, points), _convergence(row)]
    if reference is not None:
        near = [_predictions(row), _spread(row), _center(row), _left_out(row, reference)]
        clauses = [*near, *clauses]
    if not any(clauses):
        clauses = [_calibrated(row, points)]
    return tuple(reason for reason in (*clauses, _parameters(row)) if reason is not None)


def _agrees(deviation: float, error: float, band: float) -> bool:
    """Return whether the deviation lies in the band with two errors to spare (an equivalence
    test); with an unknown error it does not."""
    return abs(deviation) + ERRORS * error <= band


def _is_off(deviation: float, error: float, band: float) -> bool:
    """Return whether the deviation is larger than the band, and than two errors."""
    return abs(deviation) > band and ERRORS * error <= abs(deviation)


def _predictions(row: Row) -> Reason | None:
    gap, error = row.pair(f"{SCORE}_diff")
    if not gap > ERRORS * error:
        return None
    words = f"it predicts worse, by {with_error(gap, error)} nats per datum"
    return Reason(words, "worse predictions")


def _spread(row: Row) -> Reason | None:
    ratio = row["sd_ratio"]
    if math.isnan(ratio):
        return None
    if ratio < SD_NONE:
        words = "the function has no spread where the reference's has: overconfident about it"
        return Reason(words, "no spread")
    region = _worst_region(row)
    ratio, error = row.pair(f"sd_ratio{region}")
    deviation, relative = _log_ratio(row, region)
    whose = f"the function's sd {_REGIONS[region]} is {_digits(ratio)} times the reference's"
    if _agrees(deviation, relative, SD):
        return Reason(f"{whose}: much alike")
    if not _is_off(deviation, relative, SD):
        unknown = "by an unknown error" if math.isnan(error) else f"± {error:.2f} by sampling"
        return Reason(f"{whose}, {unknown}: undecided")
    near = row["sd_ratio_near"]
    where = " there" if region else ""
    where += f" ({_digits(near)} times near them)" if region and not math.isnan(near) else ""
    word, fault = ("over", "too narrow") if ratio < 1 else ("under", "too wide")
    return Reason(f"{whose}: {word}confident about the function{where}", fault)


def _log_ratio(row: Row, region: str) -> tuple[float, float]:
    """log of an sd ratio, and its error."""
    ratio, error = row.pair(f"sd_ratio{region}")
    ratio = max(ratio, SD_NONE)
    return math.log(ratio), error / ratio


def _worst_region(row: Row) -> str:
    """The region away from the data where the sd is off most, clearly so, and more than near
    them; empty for none."""
    near = _log_ratio(row, "_near")[0] if row["sd_ratio_near"] > 0 else 0.0
    worse = {}
    for region in ("_between", "_beyond"):
        off, error = _log_ratio(row, region)
        more = math.copysign(1, off) * (off - near) > SD_APART
        if more and _is_off(off, error, SD):
            worse[region] = abs(off)
    return max(worse, key=lambda region: worse[region], default="")


def _center(row: Row) -> Reason | None:
    off, error = row.pair("mean_shift")
    if math.isnan(off):
        return None
    if _agrees(off, error, MEAN):
        return Reason("its mean agrees")
    if not _is_off(off, error, MEAN):
        return Reason("whether its mean agrees is undecided")
    return Reason(f"its mean is off by {_digits(off)} sd of the reference", "mean off")


def _left_out(row: Row, reference: Row) -> Reason | None:
    """A difference in elpd, where no k-hat is too high for it."""
    gap, error = row.pair("elpd_diff")
    if not abs(gap) > ERRORS * error or any(r["high_k"] > 0 for r in (row, reference)):
        return None
    word = "better" if gap > 0 else "worse"
    words = f"it predicts left-out data {word} than the reference, by {abs(gap):.1f} ± {error:.1f}"
    return Reason(f"{words} nats", "" if gap > 0 else "worse predictions")


def _coverage(row: Row, points: int) -> Reason | None:
    share = row["coverage"]
    low, high = row["coverage_from"], row["coverage_to"]
    error = _error_of_coverage(points)
    if math.isnan(share) or min(0.9 - error, low) <= share <= max(0.9 + error, high):
        return None
    width = "too narrow" if share < 0.9 else "too wide"
    return Reason(f"{_INTERVAL.format(100 * share, '')}: {width}", width)


def _calibrated(row: Row, points: int) -> Reason:
    share = row["coverage"]
    if math.isnan(share):
        return Reason("nothing to hold it against")
    close = "no farther from 90 % than chance takes it"
    if _error_of_coverage(points) > COVERAGE:
        close = "too few to tell how close that is to 90 %"
    return Reason(f"{_INTERVAL.format(100 * share, f'{points} ')}, {close}")


def _error_of_coverage(points: int) -> float:
    """Two standard errors of the share of N targets in a correct 90 % interval."""
    return ERRORS * math.sqrt(0.9 * 0.1 / points)


def _convergence(row: Row) -> Reason | None:
    rhat, limit, count = row["rhat"], row["rhat_limit"], row["divergences"]
    if math.isnan(limit):
        return None
    parts = [f"{'' if rhat <= limit else 'not '}converged (R-hat {rhat:.3f} in function space)"]
    if math.isnan(rhat):
        parts = ["convergence unknown: R-hat needs two chains of 4 draws"]
    if not math.isnan(row["ess_low"]):
        parts.append(f"ESS at least {row['ess_low']:.0f}")
    if not math.isnan(count):
        parts.append(f"{count:.0f} divergence{'' if count == 1 else 's'}")
    missed = ": draws may miss parts" if row["divergent"] > DIVERGENT else ""
    return Reason(f"{', '.join(parts)}{missed}")


def _parameters(row: Row) -> Reason | None:
    """A clause on the number of parameters that the data determine if it is high or low.

    A gamma near P means that all parameters are in use, so that more units may be worth a try. A
    small gamma is one that is small beside both P and the number of data, which it cannot exceed
    by much.
    """
    gamma, latents = row["gamma"], row["latents"]
    share = f"the data determine {gamma:.3g} of {latents:.0f} parameters, nearly"
    if gamma >= GAMMA_ALL * latents:
        return Reason(f"{share} all: the network may be too small")
    data = row["fitted"]
    if gamma <= GAMMA_NONE * min(latents, latents if math.isnan(data) else data):
        return Reason(f"{share} none: the prior decides")
    return None


# ------------------------------------------------------------------------------------ answer


def answer(
    rows: Mapping[str, Row],
    judgments: Mapping[str, Judgment],
    reference: str | None,
    *,
    point: float = math.nan,
    doubtful: bool = False,
) -> str:
    """The closest, the cheapest and the ones to avoid, in two or three sentences.

    :param rows: the numbers of each posterior.
    :param judgments: of all, in order.
    :param point: the distance of a point at the reference's mean.
    :param doubtful: whether there are reasons not to trust the reference.
    """
    names = [name for name in judgments if name != reference]
    if not names:
        return ""
    if reference is None:
        return " ".join(_answer_by_score(rows, judgments))
    whose = in_words(reference)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(judgments[name].group, []).append(name)
    base = rows[reference]["seconds"]
    time = {name: rows[name]["seconds"] / base if base > 0 else math.nan for name in names}
    sentences = [f"{whose} is in doubt, so that what follows may change."] if doubtful else []
    scale = f"a point at {whose}'s mean has {point:.2g})"
    known = [name for name in names if not math.isnan(rows[name].pair(DISTANCE)[1])]
    alike, usable = groups.get(ALIKE, []), groups.get(USABLE, [])
    best = known[0] if known else names[0]
    if alike:
        best = min(alike, key=lambda name: _or_inf(time[name]))
        several = f"; the fastest of them, {best}, took" if len(alike) > 1 else ", in"
        bounds = (rows[name].pair(DISTANCE) for name in alike)
        sentences.append(
            _ALIKE.format(
                names=listed(alike), verb="agrees" if len(alike) == 1 else "agree", whose=whose,
                bound=max(distance + ERRORS * error for distance, error in bounds), scale=scale,
                time=_taken(several, time[best]),
            )
        )  # fmt: skip
    elif known:
        none, resolved = judgments[best].group == FAR, rows[best]["resolution"]
        near = [
            name
            for name in known
            if not _is_apart(rows[best], rows[name]) and (none or judgments[name].group != FAR)
        ]
        sentences.append(
            _CLOSEST.format(
                begin=f"None comes near {whose}: " if none else "", names=listed(near),
                verb="is" if len(near) == 1 else "are", to="" if none else f" to {whose}",
                distance=_range([rows[name][DISTANCE] for name in near]),
                resolved="" if math.isnan(resolved) else f"the draws resolve {resolved:.2g}; ",
                scale=scale,
                time=_taken(", in", time[best]) if best in usable else "",
            )
        )  # fmt: skip
    quick = min([*alike, *usable], key=lambda name: _or_inf(time[name]), default=best)
    if quick != best and time[quick] <= QUICK * _or_inf(time[best]):
        sentences.append(
            _CHEAPER.format(
                time=_share(time[quick], f"{whose}'s"), name=quick, group=judgments[quick].group,
                distance=rows[quick][DISTANCE],
            )
        )  # fmt: skip
    if unknown := [name for name in names if name not in known]:
        verb, own = ("is", "its") if len(unknown) == 1 else ("are", "their")
        sentences.append(_UNKNOWN.format(names=listed(unknown, MOST_NAMES), verb=verb, whose=own))
    faults: dict[str, list[str]] = {}
    for name in groups.get(FAR, []):
        faults.setdefault(judgments[name].fault, []).append(name)
    if faults:
        parts = (f"{listed(far, MOST_NAMES)} ({fault})" for fault, far in faults.items())
        sentences.append(_FAR.format(names="; ".join(parts)))
    return " ".join(sentences)


def _answer_by_score(rows: Mapping[str, Row], judgments: Mapping[str, Judgment]) -> Iterable[str]:
    alike, worse = (
        [name for name, judgment in judgments.items() if judgment.group == group]
        for group in (ALIKE, WORSE)
    )
    if len(judgments) == 1:
        yield f"There is only {next(iter(judgments))}, and nothing to compare it with."
        return
    if len(alike) == 1 and len(worse) == len(judgments) - 1:
        yield f"{alike[0]} predicts the test data best by NLPD."
    elif len(alike) > 1:
        yield (
            f"{listed(alike)} predict the test data alike: their NLPDs differ by less than two "
            "standard errors from the best."
        )
    undecided = [name for name in judgments if name not in (*alike, *worse)]
    if undecided:
        verb = "predicts" if len(undecided) == 1 else "predict"
        yield f"How well {listed(undecided, MOST_NAMES)} {verb} is undecided."
    times = {name: t for name in alike if (t := rows[name]["seconds"]) == t}
    if len(times) > 1:
        quick = min(times, key=lambda name: times[name])
        yield f"{quick} is the fastest of them ({times[quick]:.2g} s)."
    if alike and worse:
        best = rows[alike[0]][SCORE]
        gaps = _range([rows[name][SCORE] - best for name in worse])
        verb = "predicts" if len(worse) == 1 else "predict"
        yield f"{listed(worse, MOST_NAMES)} {verb} worse, by {gaps} nats per datum."
    if alike:
        yield "Without a reference it is not known how near they are to the posterior."


# -------------------------------------------------------------------------------------- words


def _is_apart(a: Row, b: Row) -> bool:
    (d_a, error_a), (d_b, error_b) = (row.pair(DISTANCE) for row in (a, b))
    return abs(d_a - d_b) > ERRORS * math.hypot(error_a, error_b)


def _taken(words: str, time: float) -> str:
    return "" if math.isnan(time) else f"{words} {_share(time, 'its')}"


def _share(time: float, whose: str) -> str:
    if time >= 1.5:
        return f"{time:.2g} times {whose} time"
    return f"{100 * time:.{'0f' if time >= 0.01 else '1g'}} % of {whose} time"


def _range(values: Sequence[float]) -> str:
    low, high = (f"{value:.2g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _digits(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}"

"""What the numbers of a comparison bear out: groups, reasons, doubts and the answer in words.

All limits stand in the table below. A difference counts from ``ERRORS`` standard errors on, and
what has an unknown error decides nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyro_bdl import metrics
from pyro_bdl.comparison.determined import reading
from pyro_bdl.comparison.evaluation import Evaluation
from pyro_bdl.metrics.distances import wasserstein1_by_chance
from pyro_bdl.utils.tables import Column, listed, with_error

Row = Mapping[str, Any]

# The limits. Convergence has its own, by the length of the chains: ``limit_of_rhat``.
ERRORS = 2.0  # standard errors that count as a difference
BY_CHANCE = 2.5  # likewise, Monte Carlo errors by which equal posteriors may differ
NEAR = 0.5  # largest distance of a usable posterior, in distances of a point at the mean
RESOLVED = 0.25  # largest distance that draws may leave open to call anything alike, likewise
SD = math.log(1.25)  # |log| of an sd ratio that counts as agreement
SD_APART = math.log(1.33)  # by which a region must be worse than near the data to be named
SD_NONE = 1e-3  # sd ratio of a function without spread
MEAN = 0.25  # difference of the means that counts as agreement, in sds of the reference
DIVERGENT = 0.01  # share of divergent draws that puts a reference in doubt
COVERAGE = 0.1  # two standard errors of a coverage, above which it says little
QUICK = 0.5  # share of the best one's time at which a cheaper posterior is worth a sentence
MOST_NAMES = 3  # in one list of the answer

ALIKE, USABLE, UNDECIDED, FAR, WORSE = "alike", "usable", "undecided", "far", "worse"
REFERENCE = "reference"
DISTANCE, SCORE = "wasserstein", "nlpd"

COLUMN = Column(
    "group",
    "group",
    style="text",
    help="alike: cannot be told from the reference, up to the errors of sampling; usable: at most "
    "half as far from it as a point at its mean; far: farther; undecided: the draws are too few to "
    "say. Without a reference, by NLPD, alike: cannot be told from the best; worse: can be.",
)
_CRITERIA = {
    DISTANCE: "Ranked by the Wasserstein-1 distance of the function to {reference}, averaged over "
    "the test points. Alike: no farther than draws of an equal posterior may be by chance, where "
    "these resolve a quarter of the distance of a point at {reference}'s mean. Usable: at most "
    "half as far as that point. Far: farther. Undecided: the draws are too few to say.",
    SCORE: "Ranked by NLPD on the test data, since there is no reference. Alike: within two "
    "standard errors (of the paired difference over the test points) of the best. Worse: beyond "
    "them.",
}
_REGIONS = {
    "between": "between the training data",
    "beyond": "beyond the training data",
    "": "on average",
}
_LONGER = (
    "longer warm-up and more draws (num_warmup and num_samples of mcmc.sample; --warmup and "
    "--draws of pyro-bdl compare)"
)
_SMALLER = "smaller steps (target_accept of mcmc.NUTS nearer 1) or a smoother model"


class Reason(NamedTuple):
    """A clause on one posterior, and the fault that it finds in a few words; empty for none."""

    words: str
    fault: str = ""


@dataclass(frozen=True)
class Judgment:
    """One posterior's place.

    :param posterior: its name.
    :param group: ``"alike"``, ``"usable"``, ``"undecided"`` or ``"far"``; without a reference
        ``"alike"``, ``"worse"`` or ``"undecided"``.
    :param reasons: what its numbers say, the gravest first.
    :param distance: the Wasserstein-1 distance of the function's distributions from the reference,
        averaged over the test points, in their units; without a reference the NLPD.
    :param error: its Monte Carlo standard error; of the NLPD the standard error, over the test
        points, of the difference from the best. NaN if unknown.
    :param resolution: the distance up to which an equal posterior may be by chance; NaN if unknown.
    :param seconds: wall-clock time of the fit; None if unknown.
    :param time: seconds divided by the reference's; None if unknown.
    """

    posterior: str
    group: str
    reasons: tuple[Reason, ...]
    distance: float
    error: float
    resolution: float = math.nan
    seconds: float | None = None
    time: float | None = None

    @property
    def fault(self) -> str:
        """The gravest fault."""
        return next((reason.fault for reason in self.reasons if reason.fault), "other shape")


@dataclass(frozen=True)
class Ranking:
    """The posteriors in order, the closest to the reference first.

    :param by: key of the ranked number in the rows: ``"wasserstein"``, or that of the NLPD without
        a reference.
    :param rows: the places; the reference itself has none.
    :param point: the distance of a point at the reference's mean, a scale for the others.
    :param reference: name of the reference; None without one.
    """

    by: str = DISTANCE
    rows: tuple[Judgment, ...] = ()
    point: float = math.nan
    reference: str | None = None

    @property
    def criteria(self) -> str:
        """The criteria of the groups, in words."""
        by = SCORE if self.reference is None else DISTANCE
        return _CRITERIA[by].format(reference=in_words(self.reference or ""))

    def names(self, *groups: str) -> list[str]:
        """Names of the posteriors in some groups, in order; all without an argument."""
        return [row.posterior for row in self.rows if not groups or row.group in groups]

    def group_of(self, posterior: str) -> str | None:
        """The group of a posterior; None if it has no place, as the reference."""
        return {row.posterior: row.group for row in self.rows}.get(posterior)

    def ordered(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows of the table in this order, with their groups; the reference comes first."""
        places = {name: place for place, name in enumerate(self.names())}
        found = sorted(rows, key=lambda row: places.get(row["posterior"], -1))
        return [row | {"group": self.group_of(row["posterior"]) or REFERENCE} for row in found]


def judge(
    rows: Sequence[Row],
    evaluations: Mapping[str, Evaluation],
    *,
    reference: str | None,
    points: int,
    score: str = SCORE,
) -> Ranking:
    """Groups and reasons of all posteriors, by their distance d to the reference.

    Draws of an equal posterior are by chance as far as ``wasserstein1_by_chance`` of the effective
    draws of both. With e the Monte Carlo error of d, and d_0 the distance of a point at the
    reference's mean::

        resolution r = chance + 2.5 e
        alike: d <= r <= d_0 / 4    usable: r < d <= d_0 / 2 - 2 e    far: d > r, d_0 / 2 + 2 e

    All others are undecided. Without a reference they are ranked by NLPD, and those without one
    stand last.

    :param rows: the rows of the table.
    :param evaluations: the posteriors by name.
    :param points: number of test points, which determines the error of a coverage.
    :param score: key of the NLPD that predictions are compared by.
    """
    own = {row["posterior"]: row for row in rows}
    base = own.get(reference)
    said = {name: reasons(row, base, points, score) for name, row in own.items()}
    found = []
    if base is None:
        for name, row, gap, error in _by_score(rows, evaluations, score):
            group = UNDECIDED if math.isnan(gap + error) else ALIKE
            group = WORSE if gap > ERRORS * error else group
            number = _number(row, score)
            found.append(
                Judgment(name, group, said[name], number, error, seconds=row.get("seconds"))
            )
        return Ranking(score, tuple(found))
    theirs = evaluations[base["posterior"]]
    point = float(
        metrics.wasserstein1(theirs.function.double().mean(0, keepdim=True), theirs.function)
    )
    for name, row in own.items():
        if name == reference:
            continue
        sizes = evaluations[name].effective, theirs.effective
        distance, error = row[DISTANCE], _number(row, f"{DISTANCE}_se")
        resolution = wasserstein1_by_chance(theirs.function, *sizes) + BY_CHANCE * error
        group = _group(distance, error, resolution, point)
        seconds, base_seconds = row.get("seconds"), base.get("seconds")
        time = seconds / base_seconds if seconds is not None and base_seconds else None
        found.append(Judgment(name, group, said[name], distance, error, resolution, seconds, time))
    found.sort(key=lambda row: row.distance)
    return Ranking(DISTANCE, tuple(found), point, reference)


def _group(distance: float, error: float, resolution: float, point: float) -> str:
    if math.isnan(resolution):
        return UNDECIDED
    if distance <= resolution:
        return ALIKE if resolution <= RESOLVED * point else UNDECIDED
    if distance + ERRORS * error <= NEAR * point:
        return USABLE
    return FAR if distance - ERRORS * error > NEAR * point else UNDECIDED


def _by_score(
    rows: Sequence[Row], evaluations: Mapping[str, Evaluation], score: str
) -> Iterable[tuple[str, Row, float, float]]:
    """Name, row, difference from the best NLPD and its error; first the best, last those without
    an NLPD."""
    known = sorted((row for row in rows if score in row), key=lambda row: row[score])
    for row in known:
        best, own = (evaluations[at["posterior"]].points[score] for at in (known[0], row))
        yield row["posterior"], row, *own.difference(best)
    for row in rows:
        if score not in row:
            yield row["posterior"], row, math.nan, math.nan


def in_words(reference: str) -> str:
    """The name of a reference in a sentence; a shipped one is called so."""
    return "the reference" if reference == REFERENCE else reference


def doubts(name: str, row: Row) -> list[str]:
    """A sentence on why a reference is in doubt: its chains disagree or diverge, or are too short
    to say."""
    found, needed = [], []
    if "rhat" in row:
        rhat, limit = row["rhat"], row["rhat_limit"]
        if math.isnan(rhat):
            found.append("R-hat is unknown, which needs two chains of 4 draws")
        elif rhat > limit:
            found.append(f"R-hat is {rhat:.3f} in function space, above {limit:.4g}")
        needed += [_LONGER] if found else []
    if _number(row, "divergent") > DIVERGENT:
        found.append(f"{100 * row['divergent']:.2g} % of its draws diverged")
        needed.append(_SMALLER)
    if not found:
        return []
    return [
        f"{name} cannot be trusted as the reference: {' and '.join(found)}. Before relying on "
        f"the distances, give it {' and '.join(needed)}."
    ]


# -------------------------------------------------------------------- reasons of one posterior


def reasons(row: Row, reference: Row | None, points: int, score: str = SCORE) -> tuple[Reason, ...]:
    """What the numbers of a posterior say, the gravest first.

    :param row: its row of the table.
    :param reference: the row of the reference; None without one.
    :param points: number of test points.
    :param score: key of the NLPD that predictions are compared by.
    """
    found: list[Reason | None] = []
    if reference is not None and row["posterior"] != reference["posterior"]:
        found += [
            _predictions(row, score),
            _spread(row),
            _center(row),
            _left_out(row, reference),
        ]
    found += [_coverage(row, points), _convergence(row)]
    known = [reason for reason in found if reason is not None] or [_calibrated(row, points)]
    of_parameters = reading(row)
    return (*known, *([Reason(of_parameters)] if of_parameters else []))


def verdict(found: Iterable[Reason]) -> str:
    """The reasons as one sentence."""
    return "; ".join(reason.words for reason in found)


def _is_clear(deviation: float, error: float, band: float) -> bool:
    """Return whether two errors are smaller than the deviation, or than the band of agreement if
    the deviation lies in it; an unknown error is not."""
    return ERRORS * error <= max(deviation, band)


def _predictions(row: Row, score: str) -> Reason | None:
    gap, error = _number(row, f"{score}_diff"), _number(row, f"{score}_diff_se")
    if not gap > ERRORS * error:
        return None
    words = f"it predicts worse, by {with_error(gap, error)} nats per datum"
    return Reason(words, "predicts worse")


def _spread(row: Row) -> Reason | None:
    ratio = _number(row, "sd_ratio")
    if math.isnan(ratio):
        return None
    if ratio < SD_NONE:
        words = "the function has no spread where the reference's has: overconfident about it"
        return Reason(words, "no spread")
    region = _worst_region(row)
    key = f"sd_ratio_{region}" if region else "sd_ratio"
    ratio, error, near = row[key], _number(row, f"{key}_se"), _number(row, "sd_ratio_near")
    whose = f"the function's sd {_REGIONS[region]} is {_digits(ratio)} times the reference's"
    ratio = max(ratio, SD_NONE)
    deviation = abs(math.log(ratio))
    if not _is_clear(deviation, error / ratio, SD):
        unknown = "by an unknown error" if math.isnan(error) else f"± {error:.2f} by sampling"
        return Reason(f"{whose}, {unknown}: undecided")
    if deviation <= SD:
        return Reason(f"{whose}: much alike")
    beside = " there" if region else ""
    beside += f" ({_digits(near)} times near them)" if region and not math.isnan(near) else ""
    if ratio < 1:
        return Reason(f"{whose}: overconfident about the function{beside}", "too narrow")
    return Reason(f"{whose}: underconfident about the function{beside}", "too wide")


def _worst_region(row: Row) -> str:
    """The region away from the data where the sd is off most, clearly so, and more than near
    them; empty for none."""
    near = _number(row, "sd_ratio_near")
    near = math.log(near) if near > 0 else 0.0
    found = {}
    for region in ("between", "beyond"):
        ratio, error = _number(row, f"sd_ratio_{region}"), _number(row, f"sd_ratio_{region}_se")
        if math.isnan(ratio):
            continue
        ratio = max(ratio, SD_NONE)
        off = math.log(ratio)
        more = math.copysign(1, off) * (off - near) > SD_APART
        if more and abs(off) > SD and _is_clear(abs(off), error / ratio, SD):
            found[region] = abs(off)
    return max(found, key=lambda region: found[region], default="")


def _center(row: Row) -> Reason | None:
    off, error = _number(row, "mean_shift"), _number(row, "mean_shift_se")
    if math.isnan(off):
        return None
    if not _is_clear(off, error, MEAN):
        return Reason("whether its mean agrees is undecided")
    if off <= MEAN:
        return Reason("its mean agrees")
    return Reason(f"its mean is off by {_digits(off)} sd of the reference", "mean off")


def _left_out(row: Row, reference: Row) -> Reason | None:
    """A difference in elpd, where no k-hat is too high for it."""
    gap, error = _number(row, "elpd_diff"), _number(row, "elpd_diff_se")
    if not abs(gap) > ERRORS * error or row.get("high_k") or reference.get("high_k"):
        return None
    word = "better" if gap > 0 else "worse"
    words = f"it predicts left-out data {word} than the reference, by {abs(gap):.1f} ± {error:.1f}"
    return Reason(f"{words} nats", "" if gap > 0 else "predicts worse")


def _coverage(row: Row, points: int) -> Reason | None:
    share = _number(row, "coverage")
    error = 2 * math.sqrt(0.9 * 0.1 / points)
    low, high = _number(row, "coverage_from"), _number(row, "coverage_to")
    low, high = min(0.9 - error, low), max(0.9 + error, high)
    if math.isnan(share) or low <= share <= high:
        return None
    width = "too narrow" if share < 0.9 else "too wide"
    return Reason(f"{_interval(share, '')}: {width}", width)


def _calibrated(row: Row, points: int) -> Reason:
    share = _number(row, "coverage")
    if math.isnan(share):
        return Reason("nothing to hold it against")
    few = 2 * math.sqrt(0.9 * 0.1 / points) > COVERAGE
    close = "too few to tell how close that is to 90 %"
    close = close if few else "no farther from 90 % than chance takes it"
    return Reason(f"{_interval(share, f'{points} ')}, {close}")


def _interval(share: float, points: str) -> str:
    held = f"holds {100 * share:.0f} % of the {points}test targets"
    return f"its 90 % interval of the target, noise included, {held}"


def _convergence(row: Row) -> Reason | None:
    if "rhat" not in row:
        return None
    rhat, size, count = row["rhat"], _number(row, "ess_low"), row.get("divergences")
    if math.isnan(rhat):
        text = "convergence unknown: R-hat needs two chains of 4 draws"
    else:
        state = "converged" if rhat <= row["rhat_limit"] else "not converged"
        text = f"{state} (R-hat {rhat:.3f} in function space)"
    text += "" if math.isnan(size) else f", ESS at least {size:.0f}"
    if count is not None:
        text += f", {count or 'no'} divergence{'' if count == 1 else 's'}"
    if rhat > row["rhat_limit"]:
        text += ": it needs longer warm-up and more draws"
    if _number(row, "divergent") > DIVERGENT:
        text += ": draws may miss parts"
    return Reason(text)


# ------------------------------------------------------------------------------------ answer


def answer(ranking: Ranking, warnings: Sequence[str] = ()) -> str:
    """The closest, the cheapest and the ones to avoid, in two or three sentences.

    :param ranking: the order of the posteriors.
    :param warnings: reasons not to trust the reference.
    """
    if not ranking.rows:
        return ""
    if ranking.reference is None:
        return " ".join(_answer_by_score(ranking.rows))
    reference = in_words(ranking.reference)
    sentences = []
    if warnings:
        sentences.append(f"{reference} is in doubt, so that what follows may change.")
    scale = f"a point at {reference}'s mean has {ranking.point:.2g}"
    best, closest = _closest(reference, ranking.rows, scale)
    sentences.append(closest)
    times = [row for row in ranking.rows if row.time is not None and row.group in (ALIKE, USABLE)]
    quick = min(times, key=_time, default=best)
    if times and _time(quick) >= 1:
        sentences.append(_none_faster(reference, ranking.rows))
    elif quick is not best and _time(quick) <= QUICK * _time(best):
        brief = "" if scale in closest else f" ({scale})"
        sentences.append(
            f"For {_share_of(_time(quick), reference)}, {quick.posterior} is {quick.group}, at W1 "
            f"{quick.distance:.2g}{brief}."
        )
    faults: dict[str, list[str]] = {}
    for row in ranking.rows:
        if row.group == FAR:
            faults.setdefault(row.fault, []).append(row.posterior)
    if faults:
        parts = [f"{listed(names, MOST_NAMES)} ({fault})" for fault, names in faults.items()]
        sentences.append(f"Far from it: {'; '.join(parts)}.")
    return " ".join(sentences)


def _closest(reference: str, rows: Sequence[Judgment], scale: str) -> tuple[Judgment, str]:
    """The fastest of those that are alike, or else the closest, and a sentence on it."""
    alike = [row for row in rows if row.group == ALIKE]
    if alike:
        best = min(alike, key=_time)
        text = f"{listed([row.posterior for row in alike])} cannot be told from {reference}"
        if best.time is not None:
            several = f"; the fastest of them, {best.posterior}, took" if len(alike) > 1 else ", in"
            text += f"{several} {_share_of(best.time, 'its')}"
        return best, f"{text}."
    first = rows[0]
    same = [row for row in rows if not _is_apart(first, row)]
    verb = "is" if len(same) == 1 else "are"
    begin = f"None comes near {reference}: " if first.group == FAR else ""
    text = f"{begin}{listed([row.posterior for row in same])} {verb} the closest"
    text += "" if begin else f" to {reference}"
    unknown = math.isnan(first.resolution)
    resolved = "an unknown distance" if unknown else f"{first.resolution:.2g}"
    text += f", at W1 {_range([row.distance for row in same])} (the draws resolve {resolved}; "
    text += f"{scale})"
    if first.group == USABLE and first.time is not None:
        text += f", in {_share_of(first.time, 'its')}"
    return first, f"{text}."


def _none_faster(reference: str, rows: Sequence[Judgment]) -> str:
    unknown = [row.posterior for row in rows if row.group == UNDECIDED and _time(row) < 1]
    text = f"None that is faster than {reference} is"
    if unknown:
        return f"{text} known to be usable (of {listed(unknown)} the draws are too few to say)."
    return f"{text} usable."


def _answer_by_score(rows: Sequence[Judgment]) -> list[str]:
    if len(rows) == 1:
        return [f"There is only {rows[0].posterior}, and nothing to compare it with."]
    alike = [row for row in rows if row.group == ALIKE]
    worse = [row for row in rows if row.group == WORSE]
    if not alike:
        return []
    names = listed([row.posterior for row in alike])
    said = f"{names} predicts the test data best by NLPD."
    if len(alike) > 1:
        said = f"{names} predict the test data alike: their NLPDs differ by less than two standard "
        said += "errors from the best."
    sentences = [said]
    times = [row for row in alike if row.seconds is not None]
    if len(times) > 1:
        quick = min(times, key=lambda row: row.seconds or 0.0)
        sentences.append(f"{quick.posterior} is the fastest of them ({quick.seconds:.2g} s).")
    if worse:
        gaps = [row.distance - rows[0].distance for row in worse]
        names = listed([row.posterior for row in worse], MOST_NAMES)
        verb = "predicts" if len(worse) == 1 else "predict"
        sentences.append(f"{names} {verb} worse, by {_range(gaps)} nats per datum.")
    return [*sentences, "Without a reference it is not known how near they are to the posterior."]


# -------------------------------------------------------------------------------------- words


def _is_apart(a: Judgment, b: Judgment) -> bool:
    return abs(a.distance - b.distance) > ERRORS * math.hypot(a.error, b.error)


def _time(row: Judgment) -> float:
    return math.inf if row.time is None else row.time


def _share_of(time: float, whose: str) -> str:
    whose = whose if whose == "its" else f"{whose}'s"
    percent = f"{100 * time:.0f}" if time >= 0.01 else f"{100 * time:.1g}"
    return f"{percent} % of {whose} time" if time < 1.5 else f"{time:.2g} times {whose} time"


def _range(values: Sequence[float]) -> str:
    low, high = (f"{value:.2g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _digits(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}"


def _number(row: Row, key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) else math.nan

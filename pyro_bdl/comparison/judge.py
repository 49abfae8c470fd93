"""Findings of a comparison: what each number says beyond its errors; groups and the answer.

Every statement is a ``Finding``, a number with its error and the limits that it is held against,
and is put in words by one template. All limits stand in the tables of checks below, but for those
of the groups (``EQUIVALENT`` and ``NEAR`` of :mod:`pyro_bdl.comparison.distances`) and of R-hat,
which goes by the length of the chains (``limit_of_rhat``).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pyro_bdl.comparison.columns import Column, listed, with_error
from pyro_bdl.comparison.distances import EQUIVALENT, NEAR
from pyro_bdl.comparison.evaluate import Evaluation
from pyro_bdl.diagnostics.summary import ESS_LIMIT
from pyro_bdl.utils.jackknife import ERRORS, number_of_groups

ALIKE, USABLE, UNDECIDED, FAR, WORSE = "alike", "usable", "undecided", "far", "worse"
REFERENCE = "reference"
DISTANCE, SCORE = "wasserstein", "nlpd"
WITHIN, BELOW, ABOVE = "within", "below", "above"

LOCAL = 0.05  # largest share of the test points at which a group's band may be left
SD_APART = 1.33  # factor by which a region's sd must be worse than near the data to be named
GAMMA_ALL, GAMMA_NONE = 0.9, 0.05  # shares of what the data may determine: nearly all, or none
_TINY = 1e-300
_ROUNDING = 1e-6  # of a share
_MOST_RUNS = 0.5  # share of a method's runs, in more than which a latent must be far
MOST_NAMES = 6  # in a group of the answer

BY_DISTANCE = (
    "Ranked by the Wasserstein-1 distance (W1) of the function to {reference}, averaged over the "
    "test points, in distances of a point at {reference}'s mean. Alike: at most a quarter. Usable: "
    "at most half. Each with two Monte Carlo errors to spare, so that more draws never lower a "
    "grade, and at 95 % of the test points, with all named latents that it draws within half. "
    "Far: more than half, on average, at more than 5 % of the test points or for such a latent. "
    "Undecided: the draws are too few to say."
)
BY_SCORE = (
    "Ranked by NLPD on the test data, since there is no reference. Worse: beyond two standard "
    "errors (of the paired difference, over test points and draws, enlarged for the number of "
    "posteriors, of which the best is the best of many) from the best. Alike: within them."
)
COLUMN = Column(
    "group",
    "group",
    style="text",
    help=f"{BY_DISTANCE.format(reference='the reference')} {BY_SCORE}",
)
# The sentences: of a finding, of a group, of a doubt.
_FINDING = "{what}: {word}{limits}"
_GROUP = "{group}: {names}."
_DOUBT = (
    "{name} cannot be trusted as the reference: {findings}. Before relying on the distances, give "
    "it {remedies}."
)
_RUNS = "mean of {runs} runs, whose differences are in the errors: "
_FEW = "too few effective draws"
_IN_DOUBT = "{whose} is in doubt, so that what follows may change."
_BY_W1 = "Distance (Wasserstein-1) of the {what} to {whose}; a point at its mean has {point}."
_BY_NLPD = (
    "NLPD on the test data in nats per datum, and differences from the best; how near they are to "
    "the posterior is not known without a reference."
)
_BEST = "The best and those within two errors of it"
_ONE = "There is only {name}, and nothing to compare it with."


class Row(dict[str, Any]):
    """The numbers of a posterior by key; NaN where they are unknown."""

    def __missing__(self, key: str) -> float:
        return math.nan

    def pair(self, key: str) -> tuple[float, float]:
        """A number and its standard error."""
        return self[key], self[f"{key}_se"]


@dataclass(frozen=True)
class Finding:
    """A statement about one number of a posterior.

    :param key: of the number in the table.
    :param value: the number.
    :param error: its standard error; 0 for a number without one, NaN if it is unknown.
    :param limits: the smallest and the largest value that count as agreement.
    :param says: ``"within"`` or ``"below"`` or ``"above"`` the limits, or ``"undecided"``.
    :param words: all of it in words.
    :param fault: the fault in a few words; empty for none.
    :param remedy: of a gate that a reference does not pass, what would help; else empty.
    """

    key: str
    value: float
    error: float
    limits: tuple[float, float]
    says: str
    words: str
    fault: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """The limits of a number, and the words for it on either side of them.

    :param key: of the number in the rows; its error is at ``key_se``, or else 0.
    :param what: the number in words, with {} in its place.
    :param low: smallest value that counts as agreement; ``high`` the largest.
    :param below: word for a smaller number, ``above`` for a larger, ``within`` for agreement,
        ``undecided`` for what the error leaves open. What has no word is not said.
    :param none: the value of no deviation at all.
    :param style: of the number, as of ``Column``.
    :param remedy: of a gate of the reference, what helps if it is closed.
    """

    key: str
    what: str
    low: float = -math.inf
    high: float = math.inf
    below: str = ""
    above: str = ""
    within: str = ""
    undecided: str = ""
    none: float = 0.0
    style: str = "number"
    digits: int = 3
    remedy: str = ""

    def of(self, row: Row, **changes: Any) -> Finding | None:
        """The finding on a row: agreement is an equivalence test, with two errors to spare, and a
        deviation is larger than the limit and than two errors. None where nothing is said.

        :param changes: of this check's fields, for limits and words that go by the row.
        """
        check = replace(self, **changes)
        value, error = row[check.key], row.get(f"{check.key}_se", 0.0)
        spare = ERRORS * error
        says = UNDECIDED
        if check.low + spare <= value <= check.high - spare:
            says = WITHIN
        elif value < check.low and check.none - value >= spare:
            says = BELOW
        elif value > check.high and value - check.none >= spare:
            says = ABOVE
        word = getattr(check, says)
        if not word or (math.isnan(value) and not check.remedy):
            return None
        limits = check.low, check.high
        unit, scale = (" %", 100) if check.style == "percent" else ("", 1)
        known = (end for end in limits if math.isfinite(end) and end != check.none)
        ends = [f"{scale * end:.{check.digits}g}" for end in known]
        of_error = "error" if error else ""
        cell = Column("value", "", style=check.style, digits=check.digits, error=of_error).cell
        what = check.what.replace("{} ", "") if math.isnan(value) else check.what
        words = _FINDING.format(
            what=what.format(cell({"value": value, "error": error})),
            word=word,
            limits=f" (limit {' to '.join(ends)}{unit})" if ends else "",
        )
        fault = word if says in (BELOW, ABOVE) else ""
        remedy = "" if says == WITHIN else check.remedy
        return Finding(check.key, value, error, limits, says, words, fault, remedy)


_SD = Check(
    "sd_ratio", "standard deviation (sd) of the function {} times the reference's", 0.8, 1.25,
    "too narrow", "too wide", "agrees", "undecided", none=1.0,
)  # fmt: skip
_REGIONS = tuple(
    replace(_SD, key=f"sd_ratio_{region}", within="", undecided="",
            what=f"sd of the function {region} the training data {{}} times the reference's")
    for region in ("between", "beyond")
)  # fmt: skip
_NEAR_DATA = "sd_ratio_near"
_PREDICTIONS = Check(
    f"{SCORE}_diff", "NLPD higher by {} nats per datum", high=0.0, above="worse predictions"
)
_LOCAL = Check(
    "far_at", "farther than half of a point's distance at {} of the test points", high=LOCAL,
    above="far in places", style="percent",
)  # fmt: skip
_LATENT = Check("latent_w1", "W1 {} of the reference's sds for the latent ")
_FAR_LATENT = "{latent} is far"
_POINT = Check("latent_off", "latents held at a point, at most {} sds off the reference's mean")
_AT_POINT = "{names} held at a point, {off} sds off"
_IN_PLACES = "far at {share:.0f} % of the test points"
_KHAT = Check(
    "khat_high", "k-hat above 0.7 at {} of the test points", high=LOCAL,
    above="does not cover the reference", style="percent",
)  # fmt: skip
_MEAN = Check(
    "mean_shift", "mean of the function {} sds off the reference's", high=0.25, above="mean off",
    within="agrees", undecided="undecided",
)  # fmt: skip
_OF_DISTANCE = {check.key for check in (_SD, *_REGIONS, _MEAN, _LOCAL, _KHAT, _LATENT)}
# Differences below 4 nats cannot be relied on (Sivula et al. 2020).
_LEFT_OUT = Check(
    "elpd_diff", "left-out data {} nats above the reference's", low=-4.0, below="worse predictions"
)
_COVERAGE = Check(
    "coverage", "{} of the test targets in their 90 % intervals, noise included",
    below="too narrow", above="too wide", style="percent", none=0.9,
)  # fmt: skip
COVERAGE = 0.1  # two standard errors of a coverage, above which it says little
_AS_CHANCE = "no farther from 90 % than chance takes it"
_TOO_FEW_POINTS = "too few to tell how close that is to 90 %"

_LONGER = (
    "longer warm-up and more draws (num_warmup and num_samples of mcmc.sample; --warmup and "
    "--draws of pyro-bdl compare)"
)
_SEVERAL = (
    "several chains, whose agreement R-hat measures (num_chains=4 of mcmc.sample; --chains of "
    "pyro-bdl compare)"
)
_SMOOTHER = (
    "non-centered hierarchies (LocScaleReparam), smaller steps (target_accept of mcmc.NUTS nearer "
    "1) or a smoother model"
)
_DEEPER = "deeper trees (max_tree_depth of mcmc.NUTS) or latents of like scales"
# The gates of a reference: R-hat and ESS are those that 95 % of the test points keep.
_RHAT = Check(
    "rhat", "R-hat {} of the function", above="not converged", within="no sign of disagreement",
    undecided="unknown, since it needs two chains of 4 draws", none=1.0, digits=4, remedy=_LONGER,
)  # fmt: skip
_OF_ONE_CHAIN: dict[str, Any] = {
    "what": "one chain", "undecided": "no R-hat", "high": math.inf, "remedy": _SEVERAL,
}  # fmt: skip
_ESS = (
    Check("ess_low", "{} effective draws of the function", below="too few", none=math.inf,
          remedy=_LONGER),
    Check("ess_tail", "{} effective draws of its tails", below="too few", none=math.inf,
          remedy=_LONGER),
)  # fmt: skip
_HAMILTONIAN = (
    Check("bfmi", "BFMI {} of the worst chain", low=0.3, below="tails are explored slowly",
          none=1.0, remedy=_SMOOTHER),
    Check("divergent", "{} of the draws diverged", high=1e-3, above="they may miss parts",
          style="percent", remedy=_SMOOTHER),
)  # fmt: skip
# Cut trees make draws slow, which effective draws count: they are the cause where those are few.
_CUT = Check(
    "saturated", "{} of the trees were cut", high=0.05, above="draws move slowly", style="percent",
)  # fmt: skip
_POINT_MASS = Check(
    "point", "W1 {} of a point at its mean", low=_TINY, none=_TINY,
    below="it has no spread that could be the scale of a distance",
    remedy="draws of a distribution, such as those of chains",
)  # fmt: skip
_MODES = Check(
    "modes", "latents in {} modes", high=1.0,
    above="R-hat of the function cannot tell how much mass each has", none=1.0,
)  # fmt: skip
_GAMMA = Check(
    "gamma", "parameters that the data determine {}", below="few, the prior decides the others",
    above="nearly all, the network may be too small",
)  # fmt: skip


@dataclass(frozen=True)
class Judgment:
    """The group of a posterior and the findings on it.

    :param group: ``"alike"``, ``"usable"``, ``"undecided"`` or ``"far"``, for the reference
        ``"reference"``; without a reference ``"alike"``, ``"worse"`` or ``"undecided"``.
    :param findings: what its numbers say, the gravest first.
    :param runs: how many runs of a method they are the means of.
    """

    group: str
    findings: tuple[Finding, ...]
    runs: int = 1

    @property
    def verdict(self) -> str:
        """The findings as one sentence."""
        begin = "the reference: " if self.group == REFERENCE else ""
        if self.runs > 1:
            begin = _RUNS.format(runs=self.runs)
        words = [finding.words for finding in self.findings]
        return begin + ("; ".join(words) or "no finding")

    @property
    def fault(self) -> str:
        """The gravest fault that sets it apart from the reference."""
        faults = (found.fault for found in self.findings if found.key in _OF_DISTANCE)
        return next(filter(None, faults), "other shape")


def judge(
    rows: Mapping[str, Row],
    evaluations: Mapping[str, Evaluation],
    reference: str | None,
    *,
    point: float = math.nan,
) -> dict[str, Judgment]:
    """Groups and findings of all posteriors, the reference first, then the closest.

    With the distance d to the reference, its Monte Carlo error e, the distance r that draws of an
    equal posterior may have by chance (``resolution``), and the distance d_0 of a point at the
    reference's mean::

        alike: d + 2 e <= d_0 / 4    usable: d + 2 e <= d_0 / 2    far: d > r, d - 2 e > d_0 / 2

    Alike and usable hold at 95 % of the test points too, and what is far at more than 5 % of them
    is far. All others are undecided. Without a reference they are ranked by NLPD, and those
    without one stand last.

    :param rows: the numbers of each posterior; without a reference they get the difference of
        NLPD from the best.
    :param evaluations: the posteriors.
    :param point: d_0.
    """
    points = next(iter(evaluations.values())).rows
    key = SCORE if reference is None else DISTANCE
    names = sorted(rows, key=lambda name: (name != reference, _or_inf(rows[name][key])))
    judgments = {}
    for name in names:
        row, base = rows[name], None if reference in (None, name) else rows[reference]
        if reference is None:
            row |= _from_best(evaluations[name], evaluations[names[0]], len(names))
            group = _group_by_score(row)
        else:
            group = _group(row, point) if base is not None else REFERENCE
        judgments[name] = Judgment(group, findings(row, base, points), int(row.get("runs", 1)))
    return judgments


def _or_inf(value: float) -> float:
    """A number to sort by: the largest if it is unknown."""
    return math.inf if math.isnan(value) else value


def _group(row: Row, point: float) -> str:
    distance, error = row.pair(DISTANCE)
    error = row.get(f"{DISTANCE}_spread_se", error)
    if math.isnan(row["resolution"]):
        return UNDECIDED
    is_far = distance > row["resolution"] and distance - ERRORS * error > NEAR * point
    far_at, over_runs = row["far_at"], row.get("far_at_se", 0.0)
    if is_far or far_at - ERRORS * over_runs > LOCAL or row["latent_far"] > _MOST_RUNS:
        return FAR
    if row["latent_beyond"] > 0:
        return UNDECIDED
    bands = (ALIKE, EQUIVALENT, "not_alike_at"), (USABLE, NEAR, "not_usable_at")
    for group, limit, share in bands:
        if distance + ERRORS * error <= limit * point and not row[share] > LOCAL:
            return group
    return UNDECIDED


def _from_best(evaluation: Evaluation, best: Evaluation, count: int) -> dict[str, float]:
    """The difference of NLPD from the best of some posteriors, and its error.

    The error is enlarged, so that of equal posteriors, of which one is the best by chance, one is
    beyond two errors in at most 5 % of the cases (Bonferroni, over all pairs).
    """
    if evaluation is best or not all(SCORE in side.points for side in (evaluation, best)):
        return {}
    pairs = count * (count - 1) // 2
    gap, error = evaluation.points[SCORE].difference(best.points[SCORE], of=pairs)
    return {f"{SCORE}_diff": gap, f"{SCORE}_diff_se": error}


def _group_by_score(row: Row) -> str:
    if math.isnan(row.get(f"{SCORE}_diff_se", row[f"{SCORE}_se"])):
        return UNDECIDED  # the best too, if its own error is unknown
    return ALIKE if _PREDICTIONS.of(row) is None else WORSE


def criteria(reference: str | None) -> str:
    """The criteria of the groups, in words."""
    return BY_SCORE if reference is None else BY_DISTANCE.format(reference=in_words(reference))


def in_words(reference: str) -> str:
    """The name of a reference in a sentence; a shipped one is called so."""
    return "the reference" if reference == REFERENCE else reference


def doubts(name: str, row: Row) -> list[str]:
    """A sentence on why a reference is in doubt, if it is: the gates that it does not pass."""
    found = [_POINT_MASS.of(row), *gates(row)]
    closed = [finding for finding in found if finding is not None and finding.remedy]
    if not closed:
        return []
    words = "; ".join(finding.words for finding in closed)
    remedies = "; ".join(dict.fromkeys(finding.remedy for finding in closed))
    return [_DOUBT.format(name=name, findings=words, remedies=remedies)]


# ------------------------------------------------------------------- findings on one posterior


def findings(row: Row, reference: Row | None, points: int) -> tuple[Finding, ...]:
    """Findings about a posterior, the gravest first.

    :param row: its numbers.
    :param reference: those of the reference; None without one, and of the reference itself.
    :param points: number of test points.
    """
    found = [_PREDICTIONS.of(row)]
    if reference is not None:
        average = [_spread(row), _MEAN.of(row)]
        if not any(finding is not None and finding.fault for finding in average):
            average += [_LOCAL.of(row), _KHAT.of(row)]  # what the averages hide
        found += [*average, _latent(row), _point(row)]
        if not any(side["high_k"] > 0 for side in (row, reference)):
            found.append(_LEFT_OUT.of(row))
    found += [_coverage(row, points), *gates(row)]
    if not any(found):
        found = [_coverage(row, points, alone=True)]
    found.append(_parameters(row))
    return tuple(finding for finding in found if finding is not None)


def gates(row: Row) -> list[Finding]:
    """Findings about chains: those with a remedy keep them from being a reference."""
    mixing: list[Finding | None] = []
    if not math.isnan(row["rhat_limit"]):
        chains = row["num_chains"]
        of_one = {} if chains > 1 else _OF_ONE_CHAIN
        mixing = [_RHAT.of(row, **{"high": row["rhat_limit"], **of_one})]
        ess = (check for check in _ESS if not math.isnan(row[check.key]))
        mixing += [check.of(row, low=ESS_LIMIT * chains) for check in ess]
    is_slow = any(finding is not None and finding.remedy for finding in mixing)
    cut = _CUT.of(row, remedy=_DEEPER if is_slow else "")
    modes = None if is_slow else _MODES.of(row)  # where slow chains are may be no mode
    others = (*(check.of(row) for check in _HAMILTONIAN), cut, modes)
    return [finding for finding in (*mixing, *others) if finding is not None]


def _latent(row: Row) -> Finding | None:
    """The named latent that is the farthest, if it is far."""
    if not row["latent_far"] > _MOST_RUNS:
        return None
    what, limit = f"{_LATENT.what}{row['latent']}", row["latent_limit"]
    return _LATENT.of(row, what=what, high=limit, above=_FAR_LATENT.format_map(row))


def _point(row: Row) -> Finding | None:
    """The named latents that the posterior does not draw: no distribution, and so no fault."""
    names = row.get("latent_point", "")
    return _POINT.of(row, within=names, undecided=names)


def _spread(row: Row) -> Finding | None:
    """The sd on average, or in a region away from the data where it is clearly off, and more than
    near them."""
    near = row[_NEAR_DATA] if row[_NEAR_DATA] > 0 else 1.0
    worse = {}
    for found in filter(None, (check.of(row) for check in _REGIONS)):
        ratio = max(found.value, 1e-3)
        if (ratio / near if found.says == ABOVE else near / ratio) > SD_APART:
            worse[abs(math.log(ratio))] = found
    return worse[max(worse)] if worse else _SD.of(row)


def _coverage(row: Row, points: int, *, alone: bool = False) -> Finding | None:
    """The coverage, against what a correct interval may have: two errors over the points, or the
    range of draws of the posterior itself, whose targets depend on each other."""
    error = ERRORS * math.sqrt(0.9 * 0.1 / points)
    low, high = row["coverage_from"], row["coverage_to"]
    chance = _TOO_FEW_POINTS if error > COVERAGE else _AS_CHANCE
    return _COVERAGE.of(
        Row(coverage=row["coverage"]), low=max(0.0, min(0.9 - error, low) - _ROUNDING),
        high=min(1.0, max(0.9 + error, high) + _ROUNDING),
        within=chance if alone else "",
    )  # fmt: skip


def _parameters(row: Row) -> Finding | None:
    """The number of parameters that the data determine if it is high or low.

    A gamma near P means that all parameters are in use, so that more units may be worth a try. A
    small gamma is one that is small beside both P and the number of data, which it cannot exceed
    by much.
    """
    latents, data = row["latents"], row["fitted"]
    most = latents if math.isnan(data) else min(latents, data)
    low, high = GAMMA_NONE * most, GAMMA_ALL * latents
    return _GAMMA.of(row, none=row["gamma"], low=low, high=high)


# ------------------------------------------------------------------------------------ answer


def answer(
    rows: Mapping[str, Row],
    judgments: Mapping[str, Judgment],
    reference: str | None,
    *,
    point: tuple[float, float] = (math.nan, math.nan),
    doubtful: bool = False,
    task: str = "regression",
) -> str:
    """Each posterior in its group, with the number that put it there.

    :param rows: the numbers of each posterior.
    :param judgments: of all, in order.
    :param point: the distance of a point at the reference's mean, and its Monte Carlo error.
    :param doubtful: whether there are reasons not to trust the reference.
    :param task: "regression", or "classification", whose function is of probabilities.
    """
    members: dict[str, list[str]] = {}
    for name, judgment in judgments.items():
        if name != reference:
            details = _details(rows, name, judgment, reference, point[0])
            members.setdefault(judgment.group, []).append(f"{name} ({', '.join(details)})")
    if reference is None and len(judgments) == 1:
        return _ONE.format(name=next(iter(judgments)))
    headings = {group: group.capitalize() for group in (ALIKE, USABLE, UNDECIDED, FAR, WORSE)}
    what = "function" if task == "regression" else "class probabilities"
    whose = in_words(reference or "")
    scale = Column("point", "", error="error").cell({"point": point[0], "error": point[1]})
    sentences = [_BY_W1.format(what=what, whose=whose, point=scale)]
    if reference is None:
        headings[ALIKE], sentences = _BEST, [_BY_NLPD]
    elif doubtful:
        sentences.insert(0, _IN_DOUBT.format(whose=in_words(reference)))
    for group, heading in headings.items():
        if group in members:
            names = listed(members[group], MOST_NAMES)
            sentences.append(_GROUP.format(group=heading, names=names))
    return " ".join(sentences) if members else ""


def _details(
    rows: Mapping[str, Row], name: str, judgment: Judgment, reference: str | None, point: float
) -> list[str]:
    """The number behind a group, the fault of what is far, and the time of what is not."""
    row, group = rows[name], judgment.group
    gap = f"{SCORE}_diff"
    key = DISTANCE if reference is not None else gap if gap in row else SCORE
    value, error = row.pair(key)
    details = [f"{'+' * (key == gap)}{with_error(value, error)}"]
    if math.isnan(error):
        sides = [side for side in (reference, name) if side is not None and _is_short(rows[side])]
        whose = f" of {listed(map(in_words, sides))}" if sides else ""
        details = [_FEW + whose if DISTANCE in row else "unknown"]
    if group == FAR:
        if value <= NEAR * point and row["far_at"] > LOCAL:
            details.append(_IN_PLACES.format(share=100 * row["far_at"]))
        far_latent = [_FAR_LATENT.format_map(row)] if row["latent_far"] > _MOST_RUNS else []
        faults = dict.fromkeys([judgment.fault, *far_latent])
        details += (fault for fault in faults if not details or fault != _LOCAL.above)
    if "latent_point" in row:
        off = with_error(*row.pair("latent_off"))
        details.append(_AT_POINT.format(names=row["latent_point"], off=off))
    seconds, base = row["seconds"], 0.0 if reference is None else rows[reference]["seconds"]
    if group in (ALIKE, USABLE) and not math.isnan(seconds):
        details.append(_share(seconds / base, reference) if base > 0 else f"{seconds:.2g} s")
    return details


def _is_short(row: Row) -> bool:
    """Return whether chains have too few effective draws for errors."""
    return number_of_groups(row.get("ess_median", math.inf)) == 0


def _share(time: float, whose: Any) -> str:
    if time >= 1.5:
        return f"{time:.2g} times {whose}'s time"
    return f"{100 * time:.{'0f' if time >= 0.01 else '1g'}} % of {whose}'s time"

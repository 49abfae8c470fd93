"""The answer of a comparison in two or three sentences: the closest, the cheapest, the ones to
avoid."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pyro_bdl.comparison.ranking import (
    ALIKE,
    ERRORS,
    FAR,
    UNDECIDED,
    USABLE,
    WORSE,
    Ranked,
    Ranking,
    in_words,
)
from pyro_bdl.utils.tables import listed

Row = Mapping[str, Any]

# A cheaper posterior is worth a sentence if it takes at most this share of the time.
_CHEAPER = 0.5
_FLAT, _NARROW, _WIDE = 0.05, 0.5, 2.0
_MOST_NAMES = 3


def answer(
    reference: str | None, ranking: Ranking, rows: Sequence[Row], warnings: Sequence[str] = ()
) -> str:
    """Sentences that only say what the errors of the numbers bear out.

    :param reference: name of the reference, or None.
    :param ranking: the order of the posteriors.
    :param rows: the rows of the table.
    :param warnings: reasons not to trust the reference.
    """
    own = {row["posterior"]: row for row in rows}
    if not ranking.rows:
        return ""
    if reference is None:
        return " ".join(_by_score(ranking))
    reference, said = in_words(reference), []
    if warnings:
        said.append(f"{reference} has not converged, so that what follows may change.")
    best = _closest(reference, ranking, said)
    _cheapest(reference, ranking, best, said)
    _to_avoid(reference, ranking, own, said)
    return " ".join(said)


def _closest(reference: str, ranking: Ranking, said: list[str]) -> Ranked:
    """Say which posterior is the closest; return it, or the fastest of several that are alike."""
    alike = [row for row in ranking.rows if row.group == ALIKE]
    if alike:
        best = min(alike, key=lambda row: math.inf if row.time is None else row.time)
        text = f"{listed([row.posterior for row in alike])} cannot be told from {reference}"
        if best.time is not None:
            of_them = f"; the fastest of them, {best.posterior}, took" if len(alike) > 1 else ", in"
            text += f"{of_them} {_share_of_time(best.time)}"
        said.append(f"{text}.")
        return best
    first = ranking.rows[0]
    same = [row for row in ranking.rows if not _clearly_apart(first, row)]
    verb, give = ("is", "gives") if len(same) == 1 else ("are", "give")
    begin = f"None comes near {reference}: " if first.group == FAR else ""
    text = f"{begin}{listed([row.posterior for row in same])} {verb} the closest"
    text += "" if begin else f" to {reference}"
    shares = [row.share for row in same if not math.isnan(row.share)]
    if shares and min(shares) <= 0:
        text += f", no nearer than {reference}'s mean alone would be"
    elif shares:
        text += f" and {give} {_percents(shares)} of it ({reference}'s mean alone would give 0 %)"
    said.append(f"{text}.")
    return first


def _cheapest(reference: str, ranking: Ranking, best: Ranked, said: list[str]) -> None:
    """Say which usable posterior is much cheaper than the best."""
    times = [row for row in ranking.rows if row.time is not None and row.group in (ALIKE, USABLE)]
    if not times:
        return
    quick = min(times, key=lambda row: row.time or 0.0)
    if (quick.time or 0.0) >= 1:
        unknown = [row.posterior for row in ranking.rows if row.group == UNDECIDED and _quick(row)]
        text = f"None that is faster than {reference} is"
        if unknown:
            text += f" known to be usable (of {listed(unknown)} the draws are too few to say)."
        said.append(text if unknown else f"{text} usable.")
        return
    if best.time is None or quick is best or (quick.time or 0.0) > _CHEAPER * best.time:
        if quick is best and best.group == USABLE:
            said[-1] = f"{said[-1][:-1]}, in {_share_of_time(best.time or 0.0)}."
        return
    said.append(
        f"For {_share_of_time(quick.time or 0.0, reference)}, {quick.posterior} gives "
        f"{_percent(quick.share)} of it{_scale(reference, said)}."
    )


def _quick(row: Ranked) -> bool:
    return row.time is not None and row.time < 1


def _to_avoid(reference: str, ranking: Ranking, rows: Mapping[str, Row], said: list[str]) -> None:
    """Say which posteriors are far, by reason; each has one reason, the gravest."""
    reasons: dict[str, list[Row]] = {}
    for name in ranking.names(FAR):
        reasons.setdefault(_reason(rows[name], ranking.score), []).append(rows[name])
    parts = []
    for reason, group in reasons.items():
        names = listed([row["posterior"] for row in group], _MOST_NAMES)
        parts.append(f"{names} {_because(reason, group, reference, ranking.score)}")
    if parts:
        said.append(f"Far from it: {'; '.join(parts)}.")


def _reason(row: Row, score: str) -> str:
    gap, error = _number(row, f"{score}_diff"), _number(row, f"{score}_diff_se")
    ratio, off = _number(row, "sd_ratio"), _number(row, "mean_shift")
    if gap > ERRORS * error:
        return "predicts worse"
    if ratio < _FLAT:
        return "flat"
    if ratio < _NARROW:
        return "narrow"
    if ratio > _WIDE:
        return "wide"
    return "shifted" if not math.isnan(off) else ""


def _because(reason: str, rows: Sequence[Row], reference: str, score: str) -> str:
    one = len(rows) == 1
    if reason == "predicts worse":
        gaps = [_number(row, f"{score}_diff") for row in rows]
        return f"{'predicts' if one else 'predict'} worse (NLPD by {_range(gaps)} nats per datum)"
    if reason == "flat":
        return f"{'has' if one else 'have'} hardly any spread"
    if reason in ("narrow", "wide"):
        ratios = [_number(row, "sd_ratio") for row in rows]
        return f"{'has' if one else 'have'} {_range(ratios)} times the sd of {reference}"
    if reason == "shifted":
        shifts = [_number(row, "mean_shift") for row in rows]
        whose = "has a mean" if one else "have means"
        return f"{whose} off by {_range(shifts)} sd of {reference}"
    return f"{'differs' if one else 'differ'} from {reference}"


def _by_score(ranking: Ranking) -> list[str]:
    if len(ranking.rows) == 1:
        return [f"There is only {ranking.rows[0].posterior}, and nothing to compare it with."]
    alike, worse = ranking.names(ALIKE), ranking.names(WORSE)
    if not alike:
        return []
    if len(alike) == 1:
        said = [f"{alike[0]} predicts the test data best by NLPD."]
    else:
        said = [
            f"{listed(alike)} predict the test data alike: their NLPDs differ by less than two "
            f"standard errors from the best."
        ]
    times = [row for row in ranking.rows if row.group == ALIKE and row.seconds is not None]
    if len(times) > 1:
        quick = min(times, key=lambda row: row.seconds or 0.0)
        said.append(f"{quick.posterior} is the fastest of them ({quick.seconds:.2g} s).")
    if worse:
        best = ranking.rows[0].distance
        gaps = [row.distance - best for row in ranking.rows if row.group == WORSE]
        verb = "predicts" if len(worse) == 1 else "predict"
        said.append(f"{listed(worse, _MOST_NAMES)} {verb} worse, by {_range(gaps)} nats per datum.")
    said.append("Without a reference it is not known how near they are to the posterior.")
    return said


# -------------------------------------------------------------------------------------- words


def _clearly_apart(a: Ranked, b: Ranked) -> bool:
    error = math.hypot(a.error, b.error)
    return abs(a.distance - b.distance) > ERRORS * (0.0 if math.isnan(error) else error)


def _scale(reference: str, said: Sequence[str]) -> str:
    """A bracket that explains 0 %, unless an earlier sentence does."""
    told = any("0 %)" in text for text in said)
    return "" if told else f" ({reference}'s mean alone would give 0 %)"


def _share_of_time(time: float, reference: str = "") -> str:
    whose = f"{reference}'s time" if reference else "its time"
    return f"{_percent(time)} of {whose}" if time < 1.5 else f"{time:.2g} times {whose}"


def _percent(share: float) -> str:
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 1 or percent < 0 else f"{percent:.1g} %"


def _percents(shares: Sequence[float]) -> str:
    low, high = (round(100 * value) for value in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    texts = [f"{value:.2g}" for value in (low, high)]
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} to {texts[1]}"


def _number(row: Row, key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) else math.nan

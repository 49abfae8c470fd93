"""Verdicts in words, computed from the numbers of a comparison."""

import math
from collections.abc import Mapping

from pyro_bdl.comparison.determined import reading
from pyro_bdl.comparison.leave_one_out import PLAIN

Row = Mapping[str, object]

# Ratios of sds within these limits count as agreement; R-hats below these as convergence.
_NARROW, _WIDE = 0.8, 1.25
_RHAT_GOOD, _RHAT_USABLE = 1.01, 1.05
# A region is mentioned if its sd ratio is off, by at least this factor more than near the data.
_APART = 1.33
_REGIONS = {"between": "between the training data", "beyond": "beyond the training data"}
# A mean that is off by less than this share of the reference's sd counts as agreement.
_OFF = 0.25
# A coverage whose error is larger says little.
_TELLING = 0.1


def verdict(
    row: Row,
    *,
    reference: Row | None,
    floor: Row | None,
    points: int,
) -> str:
    """A sentence on a posterior, from its numbers.

    :param row: its row of the table.
    :param reference: the row of the reference; None without a reference.
    :param floor: the row that compares two halves of the reference.
    :param points: number of test points, which determines the error of a coverage.
    """
    parts = []
    compared = reference is not None and row["posterior"] != reference["posterior"]
    if reference is not None and compared:
        parts += [_spread(row), _center(row, floor or {}), _left_out(row, reference)]
    parts += [_coverage(row, points), _convergence(row)]
    told = [part for part in parts if part]
    text = "; ".join(told) if told else _calibrated(row, points)
    of_parameters = reading(row)
    text += f"; {of_parameters}" if of_parameters else ""
    return text if compared or reference is None else f"the reference: {text}"


def _spread(row: Row) -> str:
    ratio = _number(row, "sd_ratio")
    if math.isnan(ratio):
        return ""
    if ratio < 1e-3:
        return "the function has no spread where the reference's has: overconfident about it"
    region = _worst_region(row)
    if region:
        here, near = _number(row, f"sd_ratio_{region}"), _number(row, "sd_ratio_near")
        word = "over" if here < _NARROW else "under"
        text = (
            f"the function's sd {_REGIONS[region]} is {_times(here)} the reference's: "
            f"{word}confident about the function there"
        )
        return text + ("" if math.isnan(near) else f" ({near:.2f} times near them)")
    text = f"the function's sd is {_times(ratio)} the reference's on average"
    if _NARROW <= ratio <= _WIDE:
        return f"{text}: much alike"
    noise = _number(row, "sd_ratio_se")
    if abs(ratio - 1) <= 2 * noise:
        return f"{text}, ± {noise:.2f} from too few draws: undecided"
    return f"{text}: {'over' if ratio < _NARROW else 'under'}confident about the function"


def _worst_region(row: Row) -> str:
    """The region where the sd is off most, and clearly more than near the training data; or an
    empty string."""
    near = _number(row, "sd_ratio_near")
    near = 1.0 if math.isnan(near) or near <= 0 else near
    found = {}
    for region in _REGIONS:
        ratio = _number(row, f"sd_ratio_{region}")
        narrow = ratio < _NARROW and ratio * _APART < near
        wide = ratio > _WIDE and ratio > near * _APART
        if narrow or wide:
            found[region] = abs(math.log(max(ratio, 1e-6)))
    return max(found, key=lambda region: found[region]) if found else ""


def _left_out(row: Row, reference: Row) -> str:
    """A difference in elpd of more than two standard errors, if both values are reliable.

    They are reliable if all k-hats are good, and no draws of a guide are used as draws of the
    posterior.
    """
    gap, error = _number(row, "elpd_diff"), _number(row, "elpd_diff_se")
    if math.isnan(gap) or abs(gap) <= 2 * error:
        return ""
    if any(one.get("high_k") != 0 or one.get("loo_by") == PLAIN for one in (row, reference)):
        return ""
    word = "better" if gap > 0 else "worse"
    return (
        f"it predicts left-out data {word} than the reference, by {abs(gap):.1f} ± {error:.1f} nats"
    )


def _center(row: Row, floor: Row) -> str:
    off = _number(row, "mean_shift")
    if math.isnan(off):
        return ""
    noise = _number(floor, "mean_shift")
    if off <= _OFF or (not math.isnan(noise) and off <= 1.5 * noise):
        return "its mean agrees"
    return f"its mean is off by {_digits(off)} sd of the reference"


def _coverage(row: Row, points: int) -> str:
    share = _number(row, "coverage")
    if math.isnan(share):
        return ""
    error = 2 * math.sqrt(0.9 * 0.1 / points)
    low, high = _number(row, "coverage_from"), _number(row, "coverage_to")
    low, high = min(0.9 - error, low), max(0.9 + error, high)
    if low <= share <= high:
        return ""
    width = "narrow" if share < 0.9 else "wide"
    return (
        f"its 90 % interval of the target, noise included, holds {100 * share:.0f} % of the test "
        f"targets: too {width}"
    )


def _calibrated(row: Row, points: int) -> str:
    share = _number(row, "coverage")
    if math.isnan(share):
        return "nothing to hold it against"
    error = 2 * math.sqrt(0.9 * 0.1 / points)
    text = (
        f"its 90 % interval of the target, noise included, holds {100 * share:.0f} % of the "
        f"{points} test targets"
    )
    if error > _TELLING:
        return f"{text}, too few to tell how close that is to 90 %"
    return f"{text}, no farther from 90 % than chance takes it"


def _convergence(row: Row) -> str:
    rhat, divergences = _number(row, "rhat"), _number(row, "divergences")
    if math.isnan(rhat) and math.isnan(divergences):
        return ""
    if math.isnan(rhat):
        text = "convergence unknown: R-hat needs two chains"
    elif rhat > _RHAT_USABLE:
        text = f"not converged (R-hat {rhat:.2f} in function space)"
    elif rhat > _RHAT_GOOD:
        text = f"nearly converged (R-hat {rhat:.3f} in function space)"
    else:
        text = f"converged (R-hat {rhat:.3f} in function space)"
    size = _number(row, "ess_min")
    if not math.isnan(size):
        text += f", ESS at least {size:.0f}"
    if divergences == 0:
        text += ", no divergences"
    if rhat > _RHAT_GOOD:
        text += ": it needs longer warm-up and more draws"
    if divergences > 0:
        plural = "s" if divergences > 1 else ""
        text += f"; {divergences:.0f} divergence{plural}: draws may miss parts"
    return text


def _times(ratio: float) -> str:
    return f"{_digits(ratio)} times"


def _digits(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}"


def _number(row: Row, key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) else math.nan

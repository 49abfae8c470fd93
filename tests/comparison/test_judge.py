"""Groups, reasons, doubts and the answer: exact on Normals, and never more than the errors bear
out."""

import functools
import math

import pytest
import torch
from helpers import comparisons
from helpers.comparisons import shift

import pyro_bdl as bdl
from pyro_bdl.comparison.costs import COSTS, Mixing
from pyro_bdl.comparison.distances import distance_of_point, groups_of, resolved
from pyro_bdl.comparison.evaluate import Evaluation
from pyro_bdl.comparison.judge import (
    ALIKE,
    FAR,
    UNDECIDED,
    USABLE,
    WORSE,
    Judgment,
    Reason,
    Row,
    answer,
    doubts,
    judge,
    reasons,
)
from pyro_bdl.comparison.metric import measure
from pyro_bdl.metrics.monte_carlo import monte_carlo_error

POINT = math.sqrt(2 / math.pi)  # E|z| of a standard Normal
X, Y = (torch.zeros(4, *shape, dtype=torch.float64) for shape in ((1,), ()))
normal = functools.partial(comparisons.normal, count=1000, dtype=torch.float64)


# ------------------------------------------------------------------------------------- groups


@pytest.fixture(scope="module")
def found():
    posteriors = {
        "shifted": normal(1.0, 1.0),
        "narrow": normal(0.0, 0.7, seed=1),
        "nuts": normal(0.0, 1.0, seed=2),
        "same": normal(0.0, 1.0, seed=3),
    }
    costs = {name: bdl.Costs(seconds=s) for name, s in zip(posteriors, (1, 2, 20, 10), strict=True)}
    return bdl.compare(shift, posteriors, X, torch.linspace(-2, 2, 4).double(), costs=costs)


def test_distances_of_normals_are_exact_and_rows_follow_the_ranks(found):
    groups = {name: judgment.group for name, judgment in found.judgments.items()}
    assert groups == {"nuts": "reference", "same": ALIKE, "narrow": USABLE, "shifted": FAR}
    assert list(found.table.index) == [*groups, "nuts, half to half"]
    assert list(groups) == list(found.verdicts)
    assert found.table.attrs["point"] == pytest.approx(POINT, rel=5e-3)
    rows = found.numbers()
    assert rows["narrow"]["wasserstein"] == pytest.approx(0.3 * POINT, abs=5e-3)
    assert rows["shifted"]["wasserstein"] == pytest.approx(1, abs=1e-2)
    assert found.judgments["shifted"].fault == "mean off" and rows["same"]["resolution"] < 0.15
    assert len(repr(found)) < 120 and "4 posteriors" in repr(found)


def test_the_answer_comes_before_the_table(found):
    assert found.summary == (
        "same agrees with nuts up to W1 0.049 (a point at nuts's mean has 0.8), in 50 % of its "
        "time. For 10 % of nuts's time, narrow is usable, at W1 0.24. Far from it: shifted (mean "
        "off)."
    )
    text = " ".join(str(found).split())
    assert text.startswith(found.summary)
    assert text.index(found.summary) < text.index("posterior group")


def evaluation(function, chains=4, **scores):
    y, places = torch.zeros(9), torch.arange(9)
    return Evaluation(
        "regression", 9, places, (), y, {}, chains, function, function.mean(0), scores=scores
    )


def judged(distance, error, a, b):
    row = Row({"wasserstein": distance, "wasserstein_se": error})
    row["resolution"] = resolved(a, b, error)
    return judge({"a": row, "b": Row()}, {"a": a, "b": b}, "b", point=distance_of_point(b))[
        "a"
    ].group


@pytest.mark.parametrize(
    "distance, error, draws, group",
    [
        (0.09, 0.02, 1000, ALIKE),  # at most 0.13; a quarter of the point's distance is 0.2
        (0.16, 0.01, 100000, ALIKE),  # also where draws tell it from the reference
        (0.17, 0.02, 1000, USABLE),
        (0.3, 0.02, 1000, USABLE),
        (0.3, 0.06, 1000, UNDECIDED),
        (0.6, 0.02, 1000, FAR),
        (0.6, 0.11, 1000, UNDECIDED),
        (0.1, 0.08, 1000, USABLE),  # at most 0.26
        (0.1, 0.2, 1000, UNDECIDED),
        (0.5, 0.02, 10, UNDECIDED),  # by chance 1.28 sqrt(2 / n) = 0.57
        (0.1, math.nan, 1000, UNDECIDED),
        (0.3, math.nan, 1000, UNDECIDED),
        (2.0, math.nan, 1000, UNDECIDED),
        (2.0, 0.1, math.nan, UNDECIDED),
    ],
)
def test_groups_by_the_distance_its_error_and_the_effective_draws(distance, error, draws, group):
    a = b = evaluation(normal(0.0, 1.0, count=4000).flat()["w"][:, None], ess_median=draws)
    assert judged(distance, error, a, b) == group


def test_the_distance_by_chance_goes_with_the_effective_draws():
    function = normal(0.0, 1.0, count=4000).flat()["w"][:, None]
    independent, correlated = evaluation(function), evaluation(function, ess_median=40.0)
    wide = resolved(independent, correlated, 0.0)
    narrow = resolved(independent, independent, 0.0)
    assert wide / narrow == pytest.approx(math.sqrt((1 / 4000 + 1 / 40) / (2 / 4000)))


def test_without_a_reference_those_without_a_score_stand_last():
    f = normal(3.0, 1.0).flat()["w"][:, None].expand(-1, 4)
    posteriors = {"unscored": bdl.PredictiveDraws(f), "bad": normal(3.0, 1.0)}
    posteriors["good"] = normal(0.0, 0.1)
    found = bdl.compare(shift, posteriors, X, Y, reference=None)
    groups = {name: judgment.group for name, judgment in found.judgments.items()}
    assert groups == {"good": ALIKE, "bad": WORSE, "unscored": UNDECIDED}
    assert list(found.table.index) == list(groups)


def apart(draws):
    """Two chains that stand apart: halves that differ more than a shifted posterior."""
    chains = 0.1 * torch.randn(2, draws, 4, dtype=torch.float64)
    chains += torch.tensor([-1.0, 1.0])[:, None, None]
    return bdl.PredictiveDraws(chains.flatten(0, 1), chains=2)


@pytest.mark.parametrize(
    "reference, words",
    [
        (lambda: apart(200), "not converged"),
        (lambda: bdl.Samples({"w": torch.randn(4, 1).double()}), "R-hat needs two chains of 4"),
        (lambda: bdl.Samples({"w": torch.randn(4, 2).double()}), "R-hat needs two chains of 4"),
    ],
)
def test_a_reference_in_doubt_decides_nothing(reference, words):
    found = bdl.compare(shift, {"near": normal(0, 0.1), "nuts": reference()}, X, Y)
    assert found.judgments["near"].group == UNDECIDED
    assert words in found.warnings[0] and "in doubt" in found.summary


def correlated(length, rho, width=1):
    """Four chains of a standard Normal, (4 length, width)."""
    steps = torch.randn(4, length, width, dtype=torch.float64)
    for t in range(1, length if rho else 0):
        steps[:, t] = rho * steps[:, t - 1] + (1 - rho**2) ** 0.5 * steps[:, t]
    return steps.flatten(0, 1)


def test_how_often_independent_draws_seem_not_to_have_converged_and_verdicts_are_right():
    """benchmarks/verdicts.py in small: 20 repetitions, so that a rate of 5 % has an error of 5 %.

    f is a standard Normal at all points; 4 x 25 and 4 x 500 independent draws, and chains with an
    autocorrelation of 0.9.
    """
    torch.manual_seed(0)
    groups = {}
    for length, rho in ((25, 0.0), (500, 0.0), (500, 0.9)):
        in_doubt = 0
        for _ in range(20):
            base = correlated(length, rho)
            mixing = {"mixing": (Mixing.of(base, 4),)}
            scores = measure(COSTS, "regression", mixing)
            in_doubt += bool(doubts("nuts", Row(scores)))
            rows, found = {"nuts": Row()}, {"nuts": evaluation(base, **scores)}
            for name, (sd, mean) in {"exact": (1, 0), "narrow": (0.7, 0), "off": (1, 0.6)}.items():
                f = mean + sd * torch.randn(1000, 1, dtype=torch.float64)
                found[name] = evaluation(f, 1)
                d = bdl.metrics.wasserstein1
                count = groups_of(found[name], found["nuts"])
                error = monte_carlo_error(d, f, base, groups=count)
                rows[name] = Row({"wasserstein": float(d(f, base)), "wasserstein_se": float(error)})
                rows[name]["resolution"] = resolved(found[name], found["nuts"], float(error))
            judgments = judge(rows, found, "nuts", point=distance_of_point(found["nuts"]))
            for name in ("exact", "narrow", "off"):
                groups.setdefault((length, rho, name), []).append(judgments[name].group)
        assert in_doubt <= 1 or rho
    for (_, _, name), seen in groups.items():
        if name == "exact":
            assert seen.count(FAR) == 0
        elif name == "narrow":  # 0.3 of a point's distance
            assert seen.count(ALIKE) + seen.count(FAR) <= 1
        else:  # 0.7 of it
            assert seen.count(ALIKE) == 0 and seen.count(USABLE) <= 1
    assert groups[500, 0.0, "exact"].count(ALIKE) == 20
    assert groups[500, 0.0, "narrow"].count(USABLE) == 20
    assert groups[500, 0.0, "off"].count(FAR) == 20


# -------------------------------------------------------------------------------------- answer


def answered(*rows, reference="nuts", **options):
    """The answer for names, groups, distances, times in those of the reference, and faults."""
    numbers, judgments = {reference: Row({"seconds": 1.0})}, {reference: Judgment("reference", ())}
    for name, group, distance, *rest in rows:
        numbers[name] = Row({"wasserstein": distance, "wasserstein_se": 0.01, "resolution": 0.04})
        numbers[name] |= {"seconds": rest[0]} if rest else {}
        judgments[name] = Judgment(group, (Reason("its function differs", "".join(rest[1:])),))
    return answer(numbers, judgments, reference, **{"point": 1.0, **options})


@pytest.mark.parametrize(
    "rows, options, words",
    [
        (
            [
                ("close", USABLE, 0.3, 0.25),
                ("bad", FAR, 0.8, 0.05, "worse predictions"),
                ("flat", FAR, 0.9, 0.05, "no spread"),
                ("map", FAR, 0.9, 0.05, "no spread"),
            ],
            {"doubtful": True},
            "nuts is in doubt, so that what follows may change. close is the closest to nuts, at "
            "W1 0.3 (the draws resolve 0.04; a point at nuts's mean has 1), in 25 % of its time. "
            "Far from it: bad (worse predictions); flat and map (no spread).",
        ),
        (
            [("slow", ALIKE, 0.01, 3.6)],
            {},
            "slow agrees with nuts up to W1 0.03 (a point at nuts's mean has 1), in 3.6 times its "
            "time.",
        ),
        (
            [("a", UNDECIDED, 0.3), ("b", FAR, 0.31, 0.1, "mean off")],
            {},
            "a is the closest to nuts, at W1 0.3 (the draws resolve 0.04; a point at nuts's mean "
            "has 1). Far from it: b (mean off).",
        ),
        (
            [("a", USABLE, 0.3), ("b", USABLE, 0.31), ("c", USABLE, 0.4)],
            {},
            "a and b are the closest to nuts, at W1 0.3 to 0.31 (",
        ),
        ([("a", FAR, 0.9)], {"reference": "reference"}, "None comes near the reference: a is the "),
    ],
)
def test_the_answer(rows, options, words):
    assert answered(*rows, **options).startswith(words)


def test_an_unknown_error_sets_none_apart():
    numbers = {"nuts": Row(), "a": Row({"wasserstein": 0.3, "wasserstein_se": 0.01})}
    numbers["b"] = Row({"wasserstein": 0.9, "wasserstein_se": math.nan})
    groups = {"nuts": "reference", "a": USABLE, "b": UNDECIDED}
    unknown = {name: Judgment(group, ()) for name, group in groups.items()}
    assert answer(numbers, unknown, "nuts", point=1.0) == (
        "a is the closest to nuts, at W1 0.3 (a point at nuts's mean has 1). How far b is, its few "
        "effective draws do not say."
    )
    numbers["a"]["wasserstein_se"] = math.nan
    text = answer(numbers, unknown, "nuts", point=1.0)
    assert text == "How far a and b are, their few effective draws do not say."


def test_without_a_reference_it_says_by_how_much_some_predict_worse():
    rows = {
        name: Row({"nlpd": value}) for name, value in zip("abc", (1.0, 1.003, 1.2), strict=True)
    }
    groups = {"a": ALIKE, "b": WORSE, "c": WORSE}
    text = answer(rows, {name: Judgment(group, ()) for name, group in groups.items()}, None)
    assert "b and c predict worse, by 0.003 to 0.2 nats per datum." in text


# ------------------------------------------------------------------------------------- reasons

NAN, LIMIT = math.nan, {"rhat_limit": 1.01}
ERRORS = {f"sd_ratio{region}_se": 0.02 for region in ("", "_near", "_between", "_beyond")}


def told(reference=True, **row):
    """The verdict on a row; of the reference itself, or without one, for None."""
    row = Row({"mean_shift_se": 0.01, "elpd_diff_se": 3.0} | ERRORS | row)
    reference = None if reference is None else Row({} if reference is True else reference)
    return Judgment(FAR, reasons(row, reference, 100)).verdict


def near(ratio, **others):
    """A row with sd ratios of regions."""
    return {"sd_ratio": ratio} | {f"sd_ratio_{name}": value for name, value in others.items()}


AVERAGE, BETWEEN, BEYOND = (
    f"the function's sd {where} is"
    for where in ("on average", "between the training data", "beyond the training data")
)


@pytest.mark.parametrize(
    "row, start, words",
    [
        # the sd, up to its error
        (near(0.0), "the function has no spread where", ""),
        (near(0.521), f"{AVERAGE} 0.52 times the reference's: overconfident about", ""),
        (near(0.97), f"{AVERAGE} 0.97 times the reference's: much alike", ""),
        ({"sd_ratio": 0.81, "sd_ratio_se": 0.09}, AVERAGE, ", ± 0.09 by sampling: undecided"),
        (near(9.12), f"{AVERAGE} 9.1 times the reference's: underconfident about", ""),
        ({"sd_ratio": 0.6, "sd_ratio_se": 0.25}, AVERAGE, ", ± 0.25 by sampling: undecided"),
        ({"sd_ratio": 1.5, "sd_ratio_se": 0.35}, AVERAGE, ", ± 0.35 by sampling: undecided"),
        ({"sd_ratio": 0.97, "sd_ratio_se": 0.5}, AVERAGE, ", ± 0.50 by sampling: undecided"),
        ({"sd_ratio": 0.6, "sd_ratio_se": NAN}, AVERAGE, "by an unknown error: undecided"),
        # the region where it is clearly off most
        (near(0.6, near=0.95, between=0.1), f"{BETWEEN} 0.10 times", "there (0.95 times near them"),
        (near(2.0, near=1.0, beyond=3.0), f"{BEYOND} 3.0 times", "underconfident"),
        (near(0.5, near=0.5, between=0.45), f"{AVERAGE} 0.50", ""),
        (near(0.9, near=0.9, between=0.9), f"{AVERAGE} 0.90", ""),
        (near(0.5, between=0.5, beyond=0.1), f"{BEYOND} 0.10", ""),
        (near(0.6, between=0.0, between_se=0.0), f"{BETWEEN} 0.00 times", ""),
        (near(0.9, between=0.5, between_se=0.2), f"{AVERAGE} 0.90 times", "much alike"),
        (near(0.9, between=0.5, between_se=NAN), f"{AVERAGE} 0.90 times", "much alike"),
        # the mean
        ({"mean_shift": 0.2, "mean_shift_se": 0.02}, "its mean agrees", ""),
        ({"mean_shift": 0.2, "mean_shift_se": 0.05}, "whether its mean agrees is undecided", ""),
        ({"mean_shift": 0.24, "mean_shift_se": 0.12}, "whether its mean agrees is undecided", ""),
        ({"mean_shift": 0.5, "mean_shift_se": 0.1}, "its mean is off by 0.50 sd of the ref", ""),
        ({"mean_shift": 0.2, "mean_shift_se": 0.15}, "whether its mean agrees is undecided", ""),
        ({"mean_shift": 0.6, "mean_shift_se": 0.4}, "whether its mean agrees is undecided", ""),
        ({"mean_shift": 0.6, "mean_shift_se": NAN}, "whether its mean agrees is undecided", ""),
        # predictions
        (
            {"nlpd_diff": 0.2, "nlpd_diff_se": 0.05},
            "it predicts worse, by 0.20 ± 0.05 nats per",
            "",
        ),
        ({"nlpd_diff": 0.2, "nlpd_diff_se": 0.15}, "nothing to hold it against", ""),
        ({"nlpd_diff": 0.2, "nlpd_diff_se": NAN}, "nothing to hold it against", ""),
        ({"nlpd_diff": -0.2, "nlpd_diff_se": 0.05}, "nothing to hold it against", ""),
        # left-out data, where they can be relied on
        ({"elpd_diff": -12.0}, "it predicts left-out data worse", "by 12.0 ± 3.0 nats"),
        ({"elpd_diff": 9.0, "high_k": 0}, "it predicts left-out data better", ""),
        ({"elpd_diff": -5.0}, "nothing", ""),
        ({"elpd_diff": -12.0, "high_k": 7}, "nothing", ""),
        ({"elpd_diff": 12.0, "elpd_diff_se": NAN}, "nothing", ""),
        ({"elpd_diff": 12.0, "reference": {"high_k": 1}}, "nothing", ""),
        # coverage
        ({"coverage": 0.6}, "its 90 % interval of the target", "holds 60 % of the test targets: t"),
        ({"coverage": 0.99}, "its", ": too wide"),
        ({"coverage": 0.87}, "its", "no farther from 90 % than chance"),
        ({"coverage": 0.75, "coverage_from": 0.7}, "its", "no farther from 90 % than chance"),
        ({"coverage": 0.99, "coverage_to": 0.995}, "its", "no farther from 90 % than chance"),
        ({"coverage": 0.65, "coverage_from": 0.7}, "its", "too narrow"),
        # convergence
        (
            {"rhat": 1.2, "ess_low": 9.0, "divergences": 0} | LIMIT,
            "not converged (R-hat 1.200 in function space), ESS at least 9, 0 divergences",
            "",
        ),
        ({"rhat": 1.04, "rhat_limit": 1.11}, "converged (R-hat 1.040 in function space)", ""),
        ({"rhat": 1.0, "divergences": 1} | LIMIT, "converged", ", 1 divergence"),
        ({"rhat": 1.0, "divergences": 80, "divergent": 0.02} | LIMIT, "converged", "miss parts"),
        ({"rhat": NAN} | LIMIT, "convergence unknown: R-hat needs two chains of 4 draws", ""),
        ({"sd_ratio": 0.1, "reference": None}, "nothing to hold it against", ""),
        # parameters that the data determine
        (
            {"gamma": 84.0, "latents": 85, "fitted": 40},
            "nothing",
            "84 of 85 parameters, nearly a",
        ),
        ({"gamma": 0.4, "latents": 85, "fitted": 40}, "nothing", "0.4 of 85 parameters, nearly n"),
        ({"gamma": 30.0, "latents": 85, "fitted": 40}, "nothing to hold it against", ""),
        ({"gamma": 20.0, "latents": 10_000, "fitted": 50}, "nothing to hold it against", ""),
    ],
)
def test_reasons(row, start, words):
    text = told(**row)
    assert text.startswith(start) and words in text
    assert ("predicts" in text) == start.startswith("it predicts")
    assert ("parameters" in text) == ("parameters" in words)
    assert not ("undecided" in text and "confident" in text)


@pytest.mark.parametrize(
    "row, words",
    [
        ({"rhat": 1.009, "divergent": 0.0} | LIMIT, None),
        ({}, None),
        ({"rhat": 1.02} | LIMIT, "not converged (R-hat 1.020 in function space)"),
        ({"rhat": 1.04, "rhat_limit": 1.11}, None),
        ({"rhat": NAN, "rhat_limit": math.inf, "num_chains": 4}, "R-hat needs"),
        ({"rhat": 1.0, "divergent": 1 / 4000} | LIMIT, None),
        ({"rhat": 1.0, "divergences": 120, "divergent": 0.03} | LIMIT, "120 divergences: draws"),
    ],
)
def test_doubts(row, words):
    found = doubts("nuts", Row(row))
    assert not found if words is None else words in found[0]
    if words is not None:
        assert ("target_accept" in found[0]) == ("divergences" in words)
        assert ("num_warmup" in found[0]) == ("R-hat" in words)


def test_one_chain_is_no_reference_and_needs_others_not_a_longer_warm_up():
    one = bdl.Samples({"w": torch.randn(1, 500).double()})
    found = bdl.compare(shift, {"near": normal(0, 1.0), "nuts": one}, X, Y)
    assert "num_chains=4" in found.warnings[0] and "num_warmup" not in found.warnings[0]

"""Groups, reasons, doubts and the answer: exact on Normals, and never more than the errors bear
out."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl.comparison.convergence import convergence
from pyro_bdl.comparison.distances import distance_of_point, groups_of, resolution
from pyro_bdl.comparison.evaluate import Evaluation
from pyro_bdl.comparison.judge import (
    ALIKE,
    FAR,
    UNDECIDED,
    USABLE,
    WORSE,
    Judgment,
    Reason,
    answer,
    doubts,
    judge,
    reasons,
)
from pyro_bdl.utils.tables import listed

POINT = math.sqrt(2 / math.pi)  # E|z| of a standard Normal


def shift(x, y=None):
    """f = w for every input; y ~ Normal(f, 1)."""
    w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
    f = pyro.deterministic("f", w.expand(len(x)))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, 1.0), obs=y)


def normal(mean, sd, count=1000, seed=0):
    """Draws that are the quantiles of a Normal in random order, as of four chains."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    levels = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return bdl.Samples({"w": (mean + sd * torch.special.ndtri(levels)[order]).reshape(4, -1)})


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
    x, y = torch.zeros(6, 1, dtype=torch.float64), torch.linspace(-2, 2, 6, dtype=torch.float64)
    return bdl.compare(shift, posteriors, x, y, costs=costs)


def test_distances_of_normals_are_exact(found):
    assert list(found.judgments) == ["nuts", "same", "narrow", "shifted"]
    assert found.table.attrs["point"] == pytest.approx(POINT, rel=5e-3)
    groups = {name: judgment.group for name, judgment in found.judgments.items()}
    assert groups == {"nuts": "reference", "same": ALIKE, "narrow": USABLE, "shifted": FAR}
    rows = found.numbers()
    assert rows["narrow"]["wasserstein"] == pytest.approx(0.3 * POINT, abs=5e-3)
    assert rows["shifted"]["wasserstein"] == pytest.approx(1, abs=1e-2)
    assert found.judgments["shifted"].fault == "mean off" and rows["same"]["resolution"] < 0.15


def test_rows_follow_the_ranks_and_the_reference_comes_first(found):
    names = ["nuts", "same", "narrow", "shifted", "nuts, half to half"]
    assert list(found.table.index) == names and list(found.verdicts) == names[:-1]
    assert list(found.evaluations) == ["shifted", "narrow", "nuts", "same"]
    assert found.table.loc["narrow", "group"] == USABLE
    assert len(repr(found)) < 120 and "4 posteriors" in repr(found)


def test_the_answer_comes_before_the_table(found):
    assert found.summary == (
        "same cannot be told from nuts, in 50 % of its time. For 10 % of nuts's time, narrow is "
        "usable, at W1 0.24 (a point at nuts's mean has 0.8). Far from it: shifted (mean off)."
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
    row = {"wasserstein": distance, "wasserstein_se": error}
    row["resolution"] = resolution(a, b, error)
    return judge({"a": row, "b": {}}, {"a": a, "b": b}, "b", point=distance_of_point(b))["a"].group


@pytest.mark.parametrize(
    "distance, error, draws, group",
    [
        (0.09, 0.02, 1000, ALIKE),  # by chance 1.28 sqrt(2 / n) = 0.057
        (0.3, 0.02, 1000, USABLE),
        (0.3, 0.06, 1000, UNDECIDED),
        (0.6, 0.02, 1000, FAR),
        (0.1, 0.08, 1000, UNDECIDED),  # 0.22 is not resolved
        (0.1, 0.02, 100, UNDECIDED),
        (0.1, math.nan, 1000, UNDECIDED),
        (0.3, math.nan, 1000, UNDECIDED),
        (2.0, math.nan, 1000, UNDECIDED),
        (2.0, 0.1, math.nan, UNDECIDED),
    ],
)
def test_groups_by_the_distance_its_error_and_the_effective_draws(distance, error, draws, group):
    function = normal(0.0, 1.0, 4000).flat()["w"][:, None]
    a = b = evaluation(function, ess_median=draws)
    assert judged(distance, error, a, b) == group


def test_the_distance_by_chance_goes_with_the_effective_draws():
    function = normal(0.0, 1.0, 4000).flat()["w"][:, None]
    independent, correlated = evaluation(function), evaluation(function, ess_median=40.0)
    wide = resolution(independent, correlated, 0.0)
    narrow = resolution(independent, independent, 0.0)
    assert wide / narrow == pytest.approx(math.sqrt((1 / 4000 + 1 / 40) / (2 / 4000)))


def test_equal_posteriors_are_seldom_told_apart_and_half_an_sd_always_is():
    """Autocorrelated chains: at most a twentieth of equal ones are told apart; shifted by half an
    sd none is called alike. 40 comparisons each, so that a share of .05 has an error of .035."""
    generator = torch.Generator().manual_seed(0)

    def draw(shift):
        steps = torch.randn(4, 400, 3, generator=generator, dtype=torch.float64)
        chain, at = [], torch.randn(4, 3, generator=generator, dtype=torch.float64)
        for step in steps.unbind(1):
            at = 0.8 * at + 0.6 * step
            chain.append(at)
        function = torch.stack(chain, 1).flatten(0, 1) + shift
        size = bdl.diagnostics.ess(function.unflatten(0, (4, -1)), progress=False).median()
        return evaluation(function, ess_median=float(size))

    def groups(shift):
        found = []
        for _ in range(40):
            a, b = draw(shift), draw(0.0)
            d = bdl.metrics.wasserstein1
            error = bdl.metrics.monte_carlo_error(d, a.function, b.function)
            found.append(judged(float(d(a.function, b.function)), float(error), a, b))
        return found

    equal = groups(0.0)
    assert sum(group in (ALIKE, UNDECIDED) for group in equal) >= 36 and ALIKE in equal
    assert ALIKE not in groups(0.5)


def test_without_a_reference_those_without_a_score_stand_last():
    x, y = torch.zeros(4, 1, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    f = normal(3.0, 1.0).flat()["w"][:, None].expand(-1, 4)
    posteriors = {"unscored": bdl.PredictiveDraws(f), "bad": normal(3.0, 1.0)}
    posteriors["good"] = normal(0.0, 0.1)
    found = bdl.compare(shift, posteriors, x, y, reference=None)
    assert list(found.table.index) == ["good", "bad", "unscored"]
    assert [judgment.group for judgment in found.judgments.values()] == [ALIKE, WORSE, UNDECIDED]


def test_chains_that_stand_apart_decide_nothing():
    """A reference whose halves differ more than a shifted posterior has no effective draws."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2, 200, 3, generator=generator, dtype=torch.float64)
    apart = (0.1 * draws + torch.tensor([-1.0, 1.0])[:, None, None]).reshape(400, 3)
    x, y = torch.zeros(3, 1, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    chains = bdl.PredictiveDraws(apart, chains=2)
    found = bdl.compare(shift, {"chains": chains, "near": normal(0, 0.1)}, x, y, reference="chains")
    assert found.judgments["near"].group == UNDECIDED and found.warnings


@pytest.mark.parametrize("draws", [1, 2])
def test_a_reference_whose_diagnostics_are_unknown_is_in_doubt_and_decides_nothing(draws):
    torch.manual_seed(0)
    x, y = torch.zeros(3, 1, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    few = bdl.Samples({"w": torch.randn(4, draws, dtype=torch.float64)})
    found = bdl.compare(shift, {"exact": normal(0, 1), "nuts": few}, x, y)
    assert found.judgments["exact"].group == UNDECIDED
    assert "R-hat is unknown" in found.warnings[0] and "in doubt" in found.summary


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
            steps = torch.randn(4, length, dtype=torch.float64)
            for t in range(1, length if rho else 0):
                steps[:, t] = rho * steps[:, t - 1] + (1 - rho**2) ** 0.5 * steps[:, t]
            rows = {"nuts": {}}
            base = steps.flatten()[:, None]
            scores = convergence(base, 4)
            in_doubt += bool(doubts("nuts", scores))
            found = {"nuts": evaluation(base, **scores)}
            for name, (sd, mean) in {"exact": (1, 0), "narrow": (0.7, 0), "off": (1, 0.6)}.items():
                f = mean + sd * torch.randn(1000, 1, dtype=torch.float64)
                found[name] = evaluation(f, 1)
                d = bdl.metrics.wasserstein1
                count = groups_of(found[name], found["nuts"])
                error = bdl.metrics.monte_carlo_error(d, f, base, groups=count)
                rows[name] = {"wasserstein": float(d(f, base)), "wasserstein_se": float(error)}
                rows[name]["resolution"] = resolution(found[name], found["nuts"], float(error))
            point = distance_of_point(found["nuts"])
            judgments = judge(rows, found, "nuts", point=point)
            for name in ("exact", "narrow", "off"):
                groups.setdefault((length, rho, name), []).append(judgments[name].group)
        assert in_doubt <= 1 or rho
    for (_, _, name), seen in groups.items():
        if name == "exact":
            assert sum(group in (ALIKE, UNDECIDED) for group in seen) >= 18
        elif name == "off":  # W1 of 0.6 is more than three times what 4 x 25 draws resolve
            assert ALIKE not in seen
    assert groups[500, 0.0, "narrow"].count(USABLE) == 20
    assert groups[500, 0.0, "off"].count(FAR) == 20


# -------------------------------------------------------------------------------------- answer


def answered(*rows, reference="nuts", **options):
    """The answer for names, groups, distances, times in those of the reference, and faults."""
    numbers, judgments = {reference: {"seconds": 1.0}}, {reference: Judgment("reference", ())}
    for name, group, distance, *rest in rows:
        numbers[name] = {"wasserstein": distance, "wasserstein_se": 0.01, "resolution": 0.04}
        numbers[name] |= {"seconds": rest[0]} if rest else {}
        judgments[name] = Judgment(group, (Reason("its function differs", "".join(rest[1:])),))
    return answer(numbers, judgments, reference, **{"point": 1.0, **options})


def test_the_closest_its_scale_and_the_faults_of_the_far_ones():
    text = answered(
        ("close", USABLE, 0.3, 0.25),
        ("bad", FAR, 0.8, 0.05, "predicts worse"),
        ("flat", FAR, 0.9, 0.05, "no spread"),
        ("map", FAR, 0.9, 0.05, "no spread"),
        ("wide", FAR, 1.2, 0.05, "too wide"),
        doubtful=True,
    )
    assert text == (
        "nuts is in doubt, so that what follows may change. close is the closest to nuts, at W1 "
        "0.3 (the draws resolve 0.04; a point at nuts's mean has 1), in 25 % of its time. Far from "
        "it: bad (predicts worse); flat and map (no spread); wide (too wide)."
    )


def test_where_only_slow_ones_are_usable_it_says_so():
    text = answered(("slow", ALIKE, 0.01, 3.6), ("quick", FAR, 0.9, 0.1))
    assert text.startswith("slow cannot be told from nuts, in 3.6 times its time. None that is ")
    assert "None that is faster than nuts is usable. Far from it: quick" in text


def test_a_quick_one_of_too_few_draws_is_not_called_unusable():
    text = answered(("slow", ALIKE, 0.01, 3.6), ("open", UNDECIDED, 0.5, 0.1))
    assert "nuts is known to be usable (of open the draws are too few to say)." in text


def test_those_whose_distances_are_not_clearly_apart_are_the_closest_together():
    text = answered(("a", USABLE, 0.3), ("b", USABLE, 0.31), ("c", USABLE, 0.4))
    assert text.startswith("a and b are the closest to nuts, at W1 0.3 to 0.31 (")
    numbers = {"nuts": {}, "a": {"wasserstein": 0.3, "wasserstein_se": 0.01}}
    numbers["b"] = {"wasserstein": 0.9, "wasserstein_se": math.nan}
    groups = {"nuts": "reference", "a": USABLE, "b": UNDECIDED}
    unknown = {name: Judgment(group, ()) for name, group in groups.items()}
    assert answer(numbers, unknown, "nuts", point=1.0).startswith("a and b are the closest")


def test_a_shipped_reference_has_an_article_and_times_may_be_unknown():
    text = answered(("a", FAR, 0.9), reference="reference")
    assert text.startswith("None comes near the reference: a is the closest, at W1 0.9")
    assert "a point at the reference's mean" in text and "time" not in text
    x, y = torch.zeros(4, 1, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    alone = bdl.compare(shift, {"only": normal(0.0, 1.0)}, x, y, reference="only")
    assert alone.summary == "" and list(alone.judgments) == ["only"]
    assert listed("abcdef", 3) == "a, b, c and 3 others" and listed("abcd", 3) == "a, b, c and d"


def test_without_a_reference_it_says_by_how_much_some_predict_worse():
    rows = {"a": {"nlpd": 1.0}, "b": {"nlpd": 1.003}, "c": {"nlpd": 1.2}}
    groups = {"a": ALIKE, "b": WORSE, "c": WORSE}
    text = answer(rows, {name: Judgment(group, ()) for name, group in groups.items()}, None)
    assert "b and c predict worse, by 0.003 to 0.2 nats per datum." in text


# ------------------------------------------------------------------------------------- reasons

NAN, LIMIT = math.nan, {"rhat_limit": 1.01}
REGIONS = {f"sd_ratio_{name}_se": 0.02 for name in ("near", "between", "beyond")}


def said(reference=True, **row):
    """The verdict on a row; of the reference itself, or without one, for None."""
    given = {"sd_ratio_se": 0.01, "mean_shift_se": 0.01} | REGIONS | row
    return Judgment(FAR, reasons(given, {} if reference is True else reference, 100)).verdict


SPREAD = "the function's sd on average is"
BETWEEN = "the function's sd between the training data is"
BEYOND = "the function's sd beyond the training data is"


@pytest.mark.parametrize(
    "row, start, words",
    [
        # the sd, up to its error
        ({"sd_ratio": 0.0}, "the function has no spread where", ""),
        ({"sd_ratio": 0.521}, f"{SPREAD} 0.52 times the reference's: overconfident about", ""),
        ({"sd_ratio": 0.97}, f"{SPREAD} 0.97 times the reference's: much alike", ""),
        ({"sd_ratio": 1.5}, f"{SPREAD} 1.50 times the reference's: underconfident about", ""),
        ({"sd_ratio": 9.12}, f"{SPREAD} 9.1 times the", "underconfident"),
        ({"sd_ratio": 0.6, "sd_ratio_se": 0.25}, SPREAD, ", ± 0.25 by sampling: undecided"),
        ({"sd_ratio": 1.5, "sd_ratio_se": 0.35}, SPREAD, ", ± 0.35 by sampling: undecided"),
        ({"sd_ratio": 0.97, "sd_ratio_se": 0.5}, SPREAD, ", ± 0.50 by sampling: undecided"),
        ({"sd_ratio": 0.6, "sd_ratio_se": NAN}, SPREAD, "by an unknown error: undecided"),
        ({"sd_ratio": 0.97, "sd_ratio_se": NAN}, SPREAD, "by an unknown error: undecided"),
        # the region where it is clearly off most
        (
            {"sd_ratio_near": 0.95, "sd_ratio_between": 0.1, "sd_ratio": 0.6},
            f"{BETWEEN} 0.10 times the reference's: overconfident about the function there",
            "(0.95 times near them)",
        ),
        (
            {"sd_ratio_near": 1.0, "sd_ratio_beyond": 3.0, "sd_ratio": 2.0},
            f"{BEYOND} 3.0 times the reference's: underconfident about the function there",
            "(1.00 times near them)",
        ),
        ({"sd_ratio_near": 0.5, "sd_ratio_between": 0.45, "sd_ratio": 0.5}, f"{SPREAD} 0.50", ""),
        ({"sd_ratio_near": 0.9, "sd_ratio_between": 0.9, "sd_ratio": 0.9}, f"{SPREAD} 0.90", ""),
        ({"sd_ratio_between": 0.5, "sd_ratio_beyond": 0.1, "sd_ratio": 0.5}, f"{BEYOND} 0.10", ""),
        (
            {"sd_ratio": 0.6, "sd_ratio_between": 0.0, "sd_ratio_between_se": 0.0},
            f"{BETWEEN} 0.00 times",
            "",
        ),
        (
            {"sd_ratio": 0.9, "sd_ratio_between": 0.5, "sd_ratio_between_se": 0.2},
            f"{SPREAD} 0.90 times the reference's: much alike",
            "",
        ),
        (
            {"sd_ratio": 0.9, "sd_ratio_between": 0.5, "sd_ratio_between_se": NAN},
            f"{SPREAD} 0.90 times the reference's: much alike",
            "",
        ),
        # the mean
        ({"mean_shift": 0.2, "mean_shift_se": 0.05}, "its mean agrees", ""),
        ({"mean_shift": 0.5, "mean_shift_se": 0.1}, "its mean is off by 0.50 sd of the ref", ""),
        ({"mean_shift": 3.0, "mean_shift_se": 0.1}, "its mean is off by 3.0 sd", ""),
        ({"mean_shift": 0.2, "mean_shift_se": 0.15}, "whether its mean agrees is undecided", ""),
        ({"mean_shift": 0.6, "mean_shift_se": 0.4}, "whether its mean agrees is undecided", ""),
        ({"mean_shift": 0.6, "mean_shift_se": NAN}, "whether its mean agrees is undecided", ""),
        # predictions
        (
            {"sd_ratio": 0.5, "nlpd_diff": 0.2, "nlpd_diff_se": 0.05},
            "it predicts worse, by 0.20 ± 0.05 nats per",
            SPREAD,
        ),
        ({"sd_ratio": 0.5, "nlpd_diff": 0.2, "nlpd_diff_se": 0.15}, SPREAD, ""),
        ({"sd_ratio": 0.5, "nlpd_diff": 0.2, "nlpd_diff_se": NAN}, SPREAD, ""),
        ({"sd_ratio": 0.5, "nlpd_diff": -0.2, "nlpd_diff_se": 0.05}, SPREAD, ""),
        # coverage
        ({"coverage": 0.6}, "its 90 % interval of the target, noise", "holds 60 % of the test"),
        ({"coverage": 0.6}, "its", ": too narrow"),
        ({"coverage": 0.99}, "its", ": too wide"),
        ({"coverage": 0.87}, "its", "no farther from 90 % than chance"),
        ({"coverage": 0.75, "coverage_from": 0.7}, "its", "no farther from 90 % than chance"),
        ({"coverage": 0.99, "coverage_to": 0.995}, "its", "no farther from 90 % than chance"),
        ({"coverage": 0.65, "coverage_from": 0.7}, "its", "too narrow"),
        # convergence
        (
            {"rhat": 1.2, "ess_low": 9.0, "divergences": 0} | LIMIT,
            "not converged (R-hat 1.200 in function space), ESS at least 9, no divergences: it",
            "needs longer warm-up and more draws",
        ),
        ({"rhat": 1.04, "rhat_limit": 1.11}, "converged (R-hat 1.040 in function space)", ""),
        ({"rhat": 1.0, "divergences": 1} | LIMIT, "converged", ", 1 divergence"),
        (
            {"rhat": 1.0, "divergences": 80, "divergent": 0.02} | LIMIT,
            "converged",
            ", 80 divergences: draws may miss parts",
        ),
        ({"rhat": NAN} | LIMIT, "convergence unknown: R-hat needs two chains of 4 draws", ""),
        ({}, "nothing to hold it against", ""),
        ({"sd_ratio": 0.1, "reference": None}, "nothing to hold it against", ""),
    ],
)
def test_reasons(row, start, words):
    text = said(**row)
    assert text.startswith(start) and words in text
    assert ("predicts worse" in text) == start.startswith("it predicts")
    assert not ("undecided" in text and "confident" in text)


@pytest.mark.parametrize(
    "row, words",
    [
        ({"elpd_diff": -12.0}, "worse than the reference, by 12.0 ± 3.0 nats"),
        ({"elpd_diff": 9.0, "high_k": 0}, "better than the reference, by 9.0"),
        ({"elpd_diff": -5.0}, ""),
        ({"elpd_diff": -12.0, "high_k": 7}, ""),
        ({"elpd_diff": 12.0, "elpd_diff_se": NAN}, ""),
        ({"elpd_diff": 12.0, "reference": {"high_k": 1}}, ""),
    ],
)
def test_left_out_data_count_where_they_can_be_relied_on(row, words):
    text = said(**{"sd_ratio": 1.0, "elpd_diff_se": 3.0} | row)
    assert words in text and ("left-out" in text) == bool(words)


@pytest.mark.parametrize(
    "row, words",
    [
        ({"rhat": 1.009, "divergent": 0.0} | LIMIT, None),
        ({}, None),
        ({"rhat": 1.02} | LIMIT, "R-hat is 1.020 in function space, above 1.01"),
        ({"rhat": 1.04, "rhat_limit": 1.11}, None),
        ({"rhat": NAN, "rhat_limit": math.inf}, "R-hat is unknown"),
        ({"rhat": 1.0, "divergent": 1 / 4000} | LIMIT, None),
        ({"rhat": 1.0, "divergent": 0.03} | LIMIT, "3 % of its draws diverged"),
    ],
)
def test_doubts(row, words):
    found = doubts("nuts", row)
    assert not found if words is None else words in found[0]
    if words is not None:
        assert ("target_accept" in found[0]) == ("diverged" in words)
        assert ("num_warmup" in found[0]) == ("R-hat" in words)

"""Ranks, groups and the answer: exact on Normals, and never more than the errors bear out."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl.comparison.answer import answer
from pyro_bdl.comparison.evaluation import Evaluation
from pyro_bdl.comparison.ranking import (
    ALIKE,
    FAR,
    UNDECIDED,
    USABLE,
    WORSE,
    Ranked,
    Ranking,
    rank_by_distance,
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


def test_ranks_and_shares_of_normals_are_exact(found):
    assert found.ranking.names() == ["same", "narrow", "shifted"]
    assert found.ranking.point == pytest.approx(POINT, rel=5e-3)
    same, narrow, shifted = found.ranking.rows
    assert (same.group, narrow.group, shifted.group) == (ALIKE, USABLE, FAR)
    assert narrow.share == pytest.approx(0.7, abs=5e-3)  # W1 of scaled Normals is 0.3 E|z|
    assert shifted.share == pytest.approx(1 - 1 / POINT, abs=1e-2)
    assert (same.time, narrow.time, shifted.seconds) == (0.5, 0.1, 1)
    assert same.floor < 0.05 and found.ranking.group_of("nuts") is None


def test_rows_follow_the_ranks_and_the_reference_comes_first(found):
    names = [row["posterior"] for row in found.rows]
    assert names == ["nuts", "same", "narrow", "shifted", "nuts, half to half"]
    assert list(found.evaluations) == ["shifted", "narrow", "nuts", "same"]
    assert list(found.verdicts) == names[:-1]
    frame = found.to_frame()
    assert list(frame.index) == names
    assert frame.loc["narrow", "group"] == USABLE and frame.loc["nuts", "group"] == "reference"
    assert frame.loc["narrow", "wasserstein"] == found.ranking.rows[1].distance
    assert len(repr(found)) < 120 and "4 posteriors" in repr(found)


def test_the_answer_comes_before_the_table(found):
    assert found.summary == (
        "same cannot be told from nuts, in 50 % of its time. For 10 % of nuts's time, narrow "
        "gives 70 % of it (nuts's mean alone would give 0 %). Far from it: shifted "
        "has a mean off by 1 sd of nuts."
    )
    text = " ".join(str(found).split())
    assert text.startswith(found.summary)
    assert text.index(found.summary) < text.index("posterior group")


def test_equal_posteriors_are_seldom_told_apart_and_half_an_sd_always_is():
    """Autocorrelated chains of equal distribution: at most a tenth are not alike; shifted by half
    an sd none is. 30 comparisons each, so that a share of a tenth has an error of .05."""
    generator = torch.Generator().manual_seed(0)

    def evaluation(shift):
        steps = torch.randn(4, 400, 3, generator=generator, dtype=torch.float64)
        chain, at = [], torch.randn(4, 3, generator=generator, dtype=torch.float64)
        for step in steps.unbind(1):
            at = 0.8 * at + 0.6 * step
            chain.append(at)
        function = torch.stack(chain, 1).flatten(0, 1) + shift
        return Evaluation("regression", 4, function, function.mean(0), None)

    def groups(shift):
        found = []
        for _ in range(30):
            a, b = evaluation(shift), evaluation(0.0)
            d = bdl.metrics.wasserstein1
            error = bdl.metrics.monte_carlo_error(d, a.function, b.function)
            row = {"posterior": "a", "wasserstein": d(a.function, b.function)}
            rows = [row | {"wasserstein_se": error}, {"posterior": "b"}]
            found.append(rank_by_distance("b", rows, {"a": a, "b": b}).group_of("a"))
        return found

    assert groups(0.0).count(ALIKE) >= 25
    assert ALIKE not in groups(0.5)


def test_few_draws_leave_it_undecided():
    draws = torch.tensor([[-1.0], [1.0], [0.5], [-0.5]], dtype=torch.float64).repeat(5, 3)
    few = Evaluation("regression", 1, draws, draws.mean(0), None)
    row = {"posterior": "a", "wasserstein": 0.3, "wasserstein_se": 0.4}
    found = rank_by_distance("b", [row, {"posterior": "b"}], {"a": few, "b": few})
    assert found.group_of("a") == UNDECIDED


def ranking(*rows):
    return Ranking(
        "wasserstein", tuple(Ranked(*row[:3], 0.01, 0.02, *row[3:]) for row in rows), 1.0
    )


def test_reasons_of_the_far_ones_and_doubts():
    places = ranking(
        ("close", USABLE, 0.3, 0.7, 5.0, 0.25),
        ("bad", FAR, 0.8, 0.2, 1.0, 0.05),
        ("flat", FAR, 0.9, 0.1, 1.0, 0.05),
        ("wide", FAR, 1.2, -0.2, 1.0, 0.05),
    )
    rows = [
        {"posterior": "close"},
        {"posterior": "bad", "nlpd_diff": 0.2, "nlpd_diff_se": 0.05, "sd_ratio": 0.3},
        {"posterior": "flat", "nlpd_diff": 0.1, "nlpd_diff_se": 0.08, "sd_ratio": 0.0},
        {"posterior": "wide", "sd_ratio": 2.5, "mean_shift": 0.1},
    ]
    text = answer("nuts", places, rows, ["R-hat is 1.1"])
    assert text == (
        "nuts has not converged, so that what follows may change. close is the closest to nuts and "
        "gives 70 % of it (nuts's mean alone would give 0 %), in 25 % of its time. Far from it: "
        "bad predicts worse (NLPD by 0.2 nats per datum); flat has hardly any spread; wide has 2.5 "
        "times the sd of nuts."
    )


def test_where_only_slow_ones_are_usable_it_says_so():
    places = ranking(("slow", ALIKE, 0.01, 0.99, 9.0, 3.6), ("quick", FAR, 0.9, 0.1, 1.0, 0.1))
    text = answer("nuts", places, [{"posterior": "slow"}, {"posterior": "quick"}])
    assert text.startswith("slow cannot be told from nuts, in 3.6 times its time. None that is ")
    assert "None that is faster than nuts is usable. Far from it: quick" in text


def test_a_quick_one_of_too_few_draws_is_not_called_unusable():
    places = ranking(("slow", ALIKE, 0.01, 0.99, 9.0, 3.6), ("open", UNDECIDED, 0.5, 0.5, 1.0, 0.1))
    text = answer("nuts", places, [{"posterior": "slow"}, {"posterior": "open"}])
    assert "nuts is known to be usable (of open the draws are too few to say)." in text


def test_a_shipped_reference_has_an_article():
    text = answer("reference", ranking(("a", FAR, 0.9, 0.1)), [{"posterior": "a"}])
    assert text.startswith("None comes near the reference: a is the closest and gives 10 % of it")
    assert "(the reference's mean alone" in text


def test_no_times_no_reference_and_nothing_near():
    untimed = answer("nuts", ranking(("a", FAR, 0.9, 0.1)), [{"posterior": "a"}])
    assert untimed.startswith("None comes near nuts: a is the closest and gives 10 % of it")
    assert "time" not in untimed
    x, y = torch.zeros(4, 1, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    alone = bdl.compare(shift, {"only": normal(0.0, 1.0)}, x, y, reference="only")
    assert alone.summary == "" and alone.ranking.rows == ()
    assert listed("abcdef", 3) == "a, b, c and 3 others" and listed("abcd", 3) == "a, b, c and d"


def test_without_a_reference_it_says_by_how_much_some_predict_worse():
    rows = (
        Ranked("a", ALIKE, 1.0, 0.0),
        Ranked("b", WORSE, 1.003, 0.001),
        Ranked("c", WORSE, 1.2, 0.02),
    )
    text = answer(None, Ranking("nlpd", rows), [])
    assert "b and c predict worse, by 0.003 to 0.2 nats per datum." in text


def test_what_is_nearer_than_the_reference_to_itself_is_not_called_far():
    """Chains of a reference that stand apart: its halves differ more than a shifted posterior."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2, 200, 3, generator=generator, dtype=torch.float64)
    apart = (0.1 * draws + torch.tensor([-1.0, 1.0])[:, None, None]).reshape(400, 3)
    x, y = torch.zeros(3, 1, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    chains = bdl.PredictiveDraws(apart, chains=2)
    posteriors = {"chains": chains, "near": normal(0.0, 0.1)}
    (row,) = bdl.compare(shift, posteriors, x, y, reference="chains").ranking.rows
    assert row.distance - 2 * row.error > half_of_point(chains) and row.group == UNDECIDED


def half_of_point(chains):
    """Half of the distance of a point at the draws' mean."""
    draws = chains.function
    return float((draws - draws.mean(0)).abs().mean()) / 2

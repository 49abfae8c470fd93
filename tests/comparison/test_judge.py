"""Groups, reasons, doubts and the answer: exact on Normals, and never more than the errors bear
out."""

import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import comparisons
from helpers.comparisons import shift

import pyro_bdl as bdl
from pyro_bdl.comparison.distances import distance_of_point, resolved
from pyro_bdl.comparison.evaluate import Evaluation
from pyro_bdl.comparison.judge import (
    ABOVE,
    ALIKE,
    BELOW,
    FAR,
    UNDECIDED,
    USABLE,
    WITHIN,
    WORSE,
    Judgment,
    Row,
    answer,
    doubts,
    findings,
    gates,
    judge,
)
from pyro_bdl.diagnostics.convergence import separate_modes

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
        "Distance (Wasserstein-1) of the function to nuts; a point at its mean has 0.798 ± 0.020. "
        "Alike: same (0.000 ± 0.025, 50 % of nuts's time). Usable: narrow (0.239 ± 0.022, 10 % of "
        "nuts's time). Far: shifted (1.00 ± 0.07, mean off, w is far)."
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
    return judge({"a": row, "b": Row()}, {"a": a, "b": b}, "b", point=distance_of_point(b)[0])[
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
        (lambda: bdl.Samples({"w": torch.randn(4, 1).double()}), "it needs two chains of 4"),
        (lambda: bdl.Samples({"w": torch.randn(1, 9).double()}), "one chain: no R-hat; "),
        (lambda: bdl.Samples({"w": torch.randn(1, 9).double()}), "give it several chains"),
        (lambda: bdl.Samples({"w": torch.randn(4, 2).double()}), "it needs two chains of 4"),
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


# -------------------------------------------------------------------------------------- answer


def answered(*rows, reference="nuts", **options):
    """The answer for names, groups, distances and times in those of the reference."""
    numbers, judgments = {reference: Row({"seconds": 1.0})}, {reference: Judgment("reference", ())}
    for name, group, distance, *rest in rows:
        numbers[name] = Row({"wasserstein": distance, "wasserstein_se": 0.01, "resolution": 0.04})
        numbers[name] |= {"seconds": rest[0]} if rest else {}
        judgments[name] = Judgment(group, findings(numbers[name], Row(), 100))
    return answer(numbers, judgments, reference, **{"point": (1.0, 0.0), **options})


HEAD = "Distance (Wasserstein-1) of the function to nuts; a point at its mean has 1. "


@pytest.mark.parametrize(
    "rows, options, words",
    [
        (
            [("slow", ALIKE, 0.01, 3.6), ("close", USABLE, 0.3, 0.25), ("bad", FAR, 0.8, 0.05)],
            {"doubtful": True},
            f"nuts is in doubt, so that what follows may change. {HEAD}Alike: slow (0.010 ± 0.010, "
            "3.6 times nuts's time). Usable: close (0.300 ± 0.010, 25 % of nuts's time). Far: bad "
            "(0.800 ± 0.010, other shape).",
        ),
        (
            [("a", UNDECIDED, 0.3), ("b", FAR, 0.31)],
            {},
            f"{HEAD}Undecided: a (0.300 ± 0.010). Far: b (0.310 ± 0.010, other shape).",
        ),
        ([("a", FAR, 0.9)], {"reference": "reference"}, "Distance (Wasserstein-1) of the function "
         "to the reference;"),
    ],
)  # fmt: skip
def test_the_answer_has_each_posterior_once_in_its_group(rows, options, words):
    text = answered(*rows, **options)
    assert text.startswith(words)
    assert all(text.count(f" {name} (") == 1 for name, *_ in rows)


def test_no_distance_is_said_whose_error_is_unknown():
    numbers = {"nuts": Row(), "b": Row({"wasserstein": 0.9, "wasserstein_se": math.nan})}
    unknown = {"nuts": Judgment("reference", ()), "b": Judgment(UNDECIDED, ())}
    text = answer(numbers, unknown, "nuts", point=(1.0, math.nan))
    assert text == f"{HEAD.replace('1.', '1 ± ?.')}Undecided: b (too few effective draws)."


def test_what_is_far_is_so_by_a_fault_of_its_function():
    row = Row(
        nlpd_diff=1.0, nlpd_diff_se=0.1, sd_ratio=0.3, sd_ratio_se=0.02, wasserstein=0.4, far_at=0.2
    )
    far = Judgment(FAR, findings(row, Row(), 100))
    assert far.findings[0].fault == "worse predictions" and far.fault == "too narrow"
    text = answer(
        {"nuts": Row(), "b": row}, {"b": far}, "nuts", point=(1.0, 0.2), task="classification"
    )
    head = "Distance (Wasserstein-1) of the class probabilities to nuts; a point at its mean has"
    assert text.startswith(f"{head} 1.00 ± 0.20. Far: b (")
    assert "far at 20 % of the test points, too narrow" in text


# ------------------------------------------------------------------------------------ findings

NAN, LIMIT = math.nan, {"rhat_limit": 1.01, "num_chains": 4}
ERRORS = {f"sd_ratio{region}_se": 0.02 for region in ("", "_near", "_between", "_beyond")}


def found_on(reference=True, **row):
    """The findings on a row by key; of the reference itself, or without one, for None."""
    row = Row({"mean_shift_se": 0.01, "elpd_diff_se": 3.0} | ERRORS | row)
    reference = None if reference is None else Row({} if reference is True else reference)
    return {finding.key: finding for finding in findings(row, reference, 100)}


def sds(ratio, **others):
    """A row with sd ratios of regions."""
    return {"sd_ratio": ratio} | {f"sd_ratio_{name}": value for name, value in others.items()}


@pytest.mark.parametrize(
    "row, key, says",
    [
        # the sd, up to its error; between 0.8 and 1.25 is agreement
        (sds(0.0), "sd_ratio", BELOW),
        (sds(0.75), "sd_ratio", BELOW),
        (sds(0.85), "sd_ratio", WITHIN),
        (sds(1.2), "sd_ratio", WITHIN),
        (sds(1.3), "sd_ratio", ABOVE),
        (sds(0.83), "sd_ratio", UNDECIDED),
        (sds(1.22), "sd_ratio", UNDECIDED),
        (sds(0.6, se=0.21), "sd_ratio", UNDECIDED),  # beyond the limit, but not two errors from 1
        (sds(0.6, se=0.19), "sd_ratio", BELOW),
        (sds(1.5, se=0.26), "sd_ratio", UNDECIDED),
        (sds(0.6, se=NAN), "sd_ratio", UNDECIDED),
        # the region where it is clearly off most
        (sds(0.6, near=0.95, between=0.1), "sd_ratio_between", BELOW),
        (sds(2.0, near=1.0, beyond=3.0), "sd_ratio_beyond", ABOVE),
        (sds(0.5, near=0.5, between=0.45), "sd_ratio", BELOW),
        (sds(0.7, near=1.0, between=0.74), "sd_ratio_between", BELOW),  # 1.33 times 0.74 is 0.98
        (sds(0.7, near=1.0, between=0.77), "sd_ratio", BELOW),
        (sds(0.5, between=0.5, beyond=0.1), "sd_ratio_beyond", BELOW),
        (sds(0.6, between=0.0, between_se=0.0), "sd_ratio_between", BELOW),
        (sds(0.9, between=0.5, between_se=0.26), "sd_ratio", WITHIN),
        (sds(0.9, between=0.5, between_se=NAN), "sd_ratio", WITHIN),
        # the mean, in sds of the reference: up to 0.25 is agreement
        ({"mean_shift": 0.2, "mean_shift_se": 0.02}, "mean_shift", WITHIN),
        ({"mean_shift": 0.2, "mean_shift_se": 0.03}, "mean_shift", UNDECIDED),
        ({"mean_shift": 0.26, "mean_shift_se": 0.12}, "mean_shift", ABOVE),
        ({"mean_shift": 0.26, "mean_shift_se": 0.14}, "mean_shift", UNDECIDED),
        ({"mean_shift": 0.6, "mean_shift_se": NAN}, "mean_shift", UNDECIDED),
        # local failures
        ({"far_at": 0.06}, "far_at", ABOVE),
        ({"far_at": 0.05}, "far_at", None),
        ({"khat_high": 0.06}, "khat_high", ABOVE),
        ({"khat_high": 0.05}, "khat_high", None),
        # predictions, from two errors on
        ({"nlpd_diff": 0.2, "nlpd_diff_se": 0.099}, "nlpd_diff", ABOVE),
        ({"nlpd_diff": 0.02, "nlpd_diff_se": 0.0099}, "nlpd_diff", ABOVE),
        ({"nlpd_diff": 0.2, "nlpd_diff_se": 0.101}, "nlpd_diff", None),
        ({"nlpd_diff": 0.2, "nlpd_diff_se": NAN}, "nlpd_diff", None),
        ({"nlpd_diff": -0.2, "nlpd_diff_se": 0.05}, "nlpd_diff", None),
        # left-out data, where they can be relied on, from 4 nats on
        ({"elpd_diff": -6.1}, "elpd_diff", BELOW),
        ({"elpd_diff": -5.9}, "elpd_diff", None),
        ({"elpd_diff": -3.9, "elpd_diff_se": 0.5}, "elpd_diff", None),
        ({"elpd_diff": -12.0, "high_k": 7}, "elpd_diff", None),
        ({"elpd_diff": -12.0, "elpd_diff_se": NAN}, "elpd_diff", None),
        ({"elpd_diff": -12.0, "reference": {"high_k": 1}}, "elpd_diff", None),
        # coverage: 84 to 96 % by chance, or as far as draws of the posterior go
        ({"coverage": 0.83}, "coverage", BELOW),
        ({"coverage": 0.97}, "coverage", ABOVE),
        ({"coverage": 0.85}, "coverage", WITHIN),
        ({"coverage": 0.75, "coverage_from": 0.7}, "coverage", WITHIN),
        ({"coverage": 0.99, "coverage_to": 0.995}, "coverage", WITHIN),
        ({"coverage": 0.65, "coverage_from": 0.7}, "coverage", BELOW),
        # parameters that the data determine
        ({"gamma": 84.0, "latents": 85, "fitted": 40}, "gamma", ABOVE),
        ({"gamma": 0.4, "latents": 85, "fitted": 40}, "gamma", BELOW),
        ({"gamma": 30.0, "latents": 85, "fitted": 40}, "gamma", None),
        ({"gamma": 20.0, "latents": 10_000, "fitted": 50}, "gamma", None),
        ({"sd_ratio": 0.1, "reference": None}, "sd_ratio", None),
    ],
)
def test_a_finding_goes_by_the_limit_and_by_two_errors(row, key, says):
    found = found_on(**row)
    assert (found[key].says if key in found else None) == says
    assert sum(name.startswith("sd_ratio") for name in found) <= 1
    for finding in found.values():
        assert bool(finding.fault) == (finding.says in (ABOVE, BELOW))


def test_a_finding_has_its_number_its_error_and_its_limits():
    finding = found_on(**sds(0.5))["sd_ratio"]
    assert (finding.value, finding.error, finding.limits) == (0.5, 0.02, (0.8, 1.25))
    assert finding.words == (
        "standard deviation (sd) of the function 0.500 ± 0.020 times the reference's: too narrow "
        "(limit 0.8 to 1.25)"
    )
    nothing = Judgment(FAR, findings(Row(), Row(), 100))
    assert nothing.verdict == "no finding" and nothing.fault == "other shape"


def test_a_few_test_points_do_not_say_how_close_a_coverage_is():
    words = [findings(Row(coverage=0.9), None, points)[0].words for points in (35, 37)]
    assert ["too few to tell" in text for text in words] == [True, False]


# --------------------------------------------------------------------------------------- gates

FINE = {"rhat": 1.009, "ess_low": 400.0, "ess_tail": 400.0, "bfmi": 0.3, "divergent": 0.001} | LIMIT
DEEPER, SMOOTHER = "max_tree_depth", "target_accept"


@pytest.mark.parametrize(
    "row, closed, remedy",
    [
        ({}, set(), ""),
        ({"rhat": 1.011}, {"rhat"}, "num_warmup"),
        ({"rhat": 1.011, "rhat_limit": 1.11}, set(), ""),
        ({"rhat": NAN}, {"rhat"}, "num_warmup"),
        ({"rhat": NAN, "num_chains": 1}, {"rhat"}, "num_chains=4"),
        ({"ess_low": 12.0, "rhat": 1.005}, {"ess_low"}, "num_warmup"),
        ({"ess_low": 399.0, "num_chains": 3}, set(), ""),
        ({"ess_tail": 399.0}, {"ess_tail"}, "num_warmup"),
        ({"bfmi": 0.29}, {"bfmi"}, SMOOTHER),
        ({"divergent": 0.0011}, {"divergent"}, SMOOTHER),
        ({"saturated": 1.0}, set(), ""),  # slow, but as many effective draws as are needed
        ({"saturated": 0.05, "ess_low": 399.0}, {"ess_low"}, "num_warmup"),
        ({"saturated": 0.06, "ess_low": 399.0}, {"ess_low", "saturated"}, DEEPER),
        ({"saturated": 0.06, "rhat": 1.02}, {"rhat", "saturated"}, DEEPER),
        ({"modes": 4}, set(), ""),
    ],
)
def test_a_gate_of_the_reference_is_closed_beyond_its_limit(row, closed, remedy):
    found = doubts("nuts", Row(FINE | row))
    assert {f.key for f in gates(Row(FINE | row)) if f.remedy} == closed
    assert bool(found) == bool(closed)
    if closed:
        assert remedy in found[0] and found[0].count("R-hat") == ("rhat" in closed) * (
            1 + (remedy == "num_chains=4")
        )


@pytest.mark.parametrize("slow", [{"rhat": 1.7}, {"ess_low": 3.5}, {"ess_tail": 13.0}])
def test_chains_that_crawl_are_in_no_modes(slow):
    """They need not overlap, wherever they go."""
    assert "modes" in {f.key for f in gates(Row({**FINE, "modes": 2}))}
    assert "modes" not in {f.key for f in gates(Row({**FINE, "modes": 2, **slow}))}


@pytest.mark.parametrize(
    "ess, own, whose",
    [
        (8.3, NAN, " of nuts"),
        (800.0, 8.0, " of swag"),
        (8.0, 8.0, " of nuts and swag"),
        (800.0, 900.0, ""),
    ],
)
def test_whose_draws_are_too_few_is_said(ess, own, whose):
    rows = {"nuts": Row(ess_median=ess), "swag": Row(wasserstein=0.1, wasserstein_se=NAN)}
    if own == own:
        rows["swag"]["ess_median"] = own
    judgments = {"nuts": Judgment("reference", ()), "swag": Judgment(UNDECIDED, ())}
    said = answer(rows, judgments, "nuts", point=(0.4, 0.0))
    assert f"Undecided: swag (too few effective draws{whose})." in said


def test_what_no_chain_made_has_no_gates():
    assert gates(Row({"sd_ratio": 1.0})) == [] and doubts("exact", Row()) == []


def chains(rho=0.0, length=1000, points=6, offset=0.0):
    """Four chains of a standard Normal at some points, as a posterior of ``shift``."""
    torch.manual_seed(0)
    w = correlated(length, rho).unflatten(0, (4, length))[..., 0]
    return w + offset * torch.tensor([-1.0, -1.0, 1.0, 1.0])[:, None]


def of_chains(w, stats=None, **info):
    """The keys of the closed gates, and of all that is said of the reference."""
    samples = bdl.Samples({"w": w}, stats or {}, info)
    found = bdl.compare(shift, {"near": normal(0, 1.0), "nuts": samples}, X, Y)
    said = found.judgments["nuts"].findings
    assert bool(found.warnings) == any(f.remedy for f in said)
    return {f.key for f in said if f.remedy}, {f.key for f in said}


def energies(moves):
    """Energies of four chains whose steps are so large beside their spread."""
    walk = torch.randn(4, 1000).double()
    return walk if moves else walk.cumsum(1)


def test_the_gates_open_and_close_by_chains():
    depth = {"options": {"max_tree_depth": 3}}
    steps = torch.full((4, 1000), 3.0)
    cut = torch.full((4, 1000), 7.0)
    diverging = torch.zeros(4, 1000, dtype=torch.bool)
    diverging[0, :5] = True
    assert of_chains(chains())[0] == set()
    assert of_chains(chains(rho=0.99))[0] >= {"ess_low", "ess_tail"}
    assert "rhat" in of_chains(chains(offset=0.5))[0]
    assert of_chains(chains(), {"energy": energies(True)})[0] == set()
    assert of_chains(chains(), {"energy": energies(False)})[0] == {"bfmi"}
    assert of_chains(chains(), {"diverging": diverging})[0] == {"divergent"}
    assert of_chains(chains(), {"num_steps": steps}, **depth)[1] == {"rhat"}
    assert of_chains(chains(), {"num_steps": cut}, **depth) == (set(), {"rhat", "saturated"})
    assert "saturated" in of_chains(chains(rho=0.99), {"num_steps": cut}, **depth)[0]


def test_twelve_effective_draws_whose_r_hat_is_right_are_no_reference():
    w = chains(length=500).sort(1).values  # each chain goes once through all values
    w = torch.stack([w[0], w[1].flip(0), w[2], w[3].flip(0)])
    found = bdl.compare(shift, {"near": normal(0, 1.0), "nuts": bdl.Samples({"w": w})}, X, Y)
    row = found.numbers()["nuts"]
    assert row["ess_low"] < 12 and found.warnings and found.judgments["near"].group == UNDECIDED


def symmetric(x, y=None):
    """f = w1 w2, the same for both signs."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    f = pyro.deterministic("f", (w[0] * w[1]).expand(len(x)))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, 1.0), obs=y)


def test_modes_that_r_hat_of_the_function_does_not_see_are_said():
    torch.manual_seed(0)
    w = 2 + 0.1 * torch.randn(4, 500, 2)
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0])[:, None, None]
    posteriors = {"one": bdl.Samples({"w": w}), "two": bdl.Samples({"w": signs * w})}
    for name, modes in (("one", 1), ("two", 2)):
        found = bdl.compare(symmetric, posteriors, X.float(), Y.float(), reference=name)
        row = found.numbers()[name]
        assert row["modes"] == modes and row["rhat"] < 1.01 and not found.warnings
        assert ("latents in 2 modes" in found.verdicts[name]) == (modes == 2)
    assert separate_modes(torch.cat([w, signs * w, -w[:1]])) == 2


def test_one_chain_is_no_reference_and_needs_others_not_a_longer_warm_up():
    one = bdl.Samples({"w": torch.randn(1, 500).double()})
    found = bdl.compare(shift, {"near": normal(0, 1.0), "nuts": one}, X, Y)
    assert "num_chains=4" in found.warnings[0] and "num_warmup" not in found.warnings[0]


# ------------------------------------------------------------------------------ local failures


@pytest.mark.parametrize(
    "share, width, groups",
    [
        (0.0, 1.0, {ALIKE}),
        (0.05, 0.1, {ALIKE}),
        (0.2, 0.1, {FAR}),
        (0.2, 0.6, {USABLE}),  # 0.4 of a point's distance there
        (0.2, 3.0, {FAR}),
    ],
)
def test_an_average_does_not_hide_where_a_posterior_fails(share, width, groups):
    """100 points; at some of them the sd is another."""
    torch.manual_seed(0)
    x, places = torch.linspace(-1, 1, 100)[:, None], torch.arange(100) < 100 * share
    basis = torch.stack([(k * math.pi * (x[:, 0] + 1) / 2).cos() for k in range(8)]) / 8**0.5
    f, base = (torch.randn(1000, 8) @ basis for _ in range(2))
    f = torch.where(places, width * f, f)
    sets = {"q": bdl.PredictiveDraws(f), "exact": bdl.PredictiveDraws(base)}
    found = bdl.compare(shift, sets, x, torch.zeros(100), reference="exact")
    assert found.judgments["q"].group in groups
    said = {finding.key: finding.says for finding in found.judgments["q"].findings}
    is_hidden = share > 0.1 and width == 0.1  # the sd on average is 0.82 of the reference's
    assert ("far_at" in said) == ("khat_high" in said) == is_hidden
    assert (said["sd_ratio"] == ABOVE) == (width == 3.0)


def test_limits_of_a_coverage_are_shares():
    """Of 20 points two errors are 13 %, and no share is above 100 %."""
    row = Row(coverage=0.7, coverage_from=0.75, coverage_to=0.99)
    (finding,) = (f for f in findings(row, None, 20) if f.key == "coverage")
    assert finding.says == BELOW and finding.limits[1] == 1.0
    assert finding.words.endswith("(limit 75 to 100 %)")


# ------------------------------------------------------------------------------ hostile inputs


def draws_of(function, y, noise=0.5):
    if function.max() > 1e9:
        return bdl.PredictiveDraws(function)
    density = torch.distributions.Normal(function, noise).log_prob(y)
    return bdl.PredictiveDraws(function, function + noise * torch.randn_like(function), density)


def compared(reference, points=30, **functions):
    x = torch.linspace(-1, 1, points)[:, None].double()
    model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1).double()), noise=0.5)
    sets = {name: draws_of(f[:, :points], x[:, 0]) for name, f in functions.items()}
    return bdl.compare(model, sets, x, x[:, 0], reference=reference, progress=False)


def functions(count, spread=0.2):
    return torch.linspace(-1, 1, 30).double() + spread * torch.randn(count, 1).double()


@pytest.mark.parametrize(("points", "count"), [(1, 100), (30, 2)])
def test_the_best_of_scores_without_an_error_is_not_known(points, count):
    found = compared(None, points, a=functions(count), b=functions(count))
    assert {judgment.group for judgment in found.judgments.values()} == {UNDECIDED}


def test_a_reference_without_spread_has_no_scale():
    found = compared("b", a=functions(100), b=functions(100, 0.0))
    assert "no spread that could be the scale" in found.warnings[0]
    assert "sd_ratio" not in [finding.key for finding in found.judgments["a"].findings]


def test_a_draw_that_is_huge_leaves_a_posterior_undecided():
    """Its sd overflows, and so does the error."""
    function = functions(100)
    function[3] = 1e300
    found = compared("b", a=function, b=functions(100))
    assert found.judgments["a"].group == UNDECIDED and "± inf" in str(found)
    assert compared("a", a=function, b=functions(100)).judgments["b"].group == UNDECIDED


def test_a_coverage_at_its_limit_is_within_it():
    """By 23 of 30 targets, where the limit is as many, but in another precision."""
    row = Row(coverage=23 / 30, coverage_from=23 / 30 + 1e-9, coverage_to=1.0)
    assert not [finding for finding in findings(row, None, 30) if finding.fault]

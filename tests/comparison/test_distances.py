"""Distances to the reference: closed forms, their errors, the floor."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.comparisons import normal, shift

import pyro_bdl as bdl
from pyro_bdl.comparison.distances import distances, resolved, sd_of_draws, sd_ratios
from pyro_bdl.comparison.evaluate import Evaluation
from pyro_bdl.comparison.metric import evenly

X, Y = torch.zeros(5, 1), torch.zeros(5)


def folded(mean, sd):
    """E|Normal(mean, sd)|"""
    return sd * math.sqrt(2 / math.pi) * math.exp(-(mean**2) / (2 * sd**2)) + mean * math.erf(
        mean / (sd * math.sqrt(2))
    )


@pytest.fixture(scope="module")
def table():
    return bdl.compare(shift, {"a": normal(1.0, 0.5), "nuts": normal(0.0, 1.0, seed=1)}, X, Y)


def test_between_normals_all_are_the_closed_forms(table):
    row = table.numbers()["a"]
    closed = {"mean_error": 1.0, "sd_error": 0.5, "sd_ratio": 0.5, "wasserstein": folded(1, 0.5)}
    closed |= {"wasserstein2": math.sqrt(1 + 0.25), "aleatoric": 1.0, "epistemic": 0.5}
    # predictive Normals of variance 1.25 and 2
    closed["kl"] = (2 / 1.25 + 1 / 1.25 - 1 + math.log(1.25 / 2)) / 2
    assert {key: row[key] for key in closed} == pytest.approx(closed, rel=1e-2)
    energy = 2 * folded(1, math.sqrt(1.25)) - folded(0, math.sqrt(0.5)) - folded(0, math.sqrt(2))
    assert row["energy"] == pytest.approx(energy, abs=4 * row["energy_se"])
    l = 0.9539  # the median of |Normal(0, sqrt(2))|

    def kernel(mean, variance):
        total = l**2 + variance
        return l / math.sqrt(total) * math.exp(-(mean**2) / (2 * total))

    mmd = kernel(0, 0.5) + kernel(0, 2) - 2 * kernel(1, 1.25)
    assert row["mmd"] == pytest.approx(mmd, abs=4 * row["mmd_se"])


def test_each_has_an_error_and_a_floor(table):
    row, floor = table.numbers()["a"], [*table.numbers().values()][-1]
    keys = ["mean_error", "sd_error", "wasserstein", "wasserstein2", "energy", "mmd", "kl"]
    for key in (*keys, "sd_ratio"):
        assert 0 < row[f"{key}_se"] < 0.2 * abs(row[key]) + 0.02
        assert math.isfinite(floor[key]) and floor[f"{key}_se"] > 0
    for key in keys:
        assert abs(floor[key]) < row[key] / 4
    assert floor["sd_ratio"] == pytest.approx(1.0, abs=0.1)


def of_draws(function):
    """The evaluation of draws of f (S, N), with noise of sd 1."""
    mean, noise = function.mean(0), torch.ones_like(function)
    y, places = torch.zeros(2), torch.arange(2)
    return Evaluation(
        "regression", 2, places, (), y, {}, 2, function, mean, expected=function, noise=noise
    )


def test_the_error_is_that_of_other_draws():
    rows = []
    for seed in range(12):
        torch.manual_seed(seed)
        first, second = (torch.randn(400, 1).expand(400, 2) for _ in range(2))
        rows.append(distances(of_draws(1 + 0.5 * first), of_draws(second)))
    for key in ("wasserstein", "energy", "sd_ratio", "kl"):
        true = torch.tensor([row[key] for row in rows]).std()  # known to 21 %
        stated = torch.tensor([row[f"{key}_se"] for row in rows]).mean()
        assert stated == pytest.approx(true.item(), rel=0.45), key


def test_khat_finds_what_is_too_narrow():
    draws = {"narrow": normal(0.0, 0.1), "wide": normal(0.0, 1.5, seed=1)}
    draws |= {"point": bdl.Samples({"w": torch.zeros(4, 100)}), "nuts": normal(0.0, 1.0, seed=2)}
    rows = bdl.compare(shift, draws, X, Y).numbers()
    assert [rows[name]["khat_high"] for name in ("narrow", "wide")] == [1.0, 0.0]
    assert rows["point"]["sd_ratio"] == 0 and rows["point"]["mmd"] > 0.1


def test_evenly_takes_as_many_of_each_chain():
    draws = torch.arange(20.0)[:, None]
    assert evenly(draws, 2, 6).flatten().tolist() == [0, 3, 6, 10, 13, 16]
    assert torch.equal(evenly(draws, 2, 20), draws)


def test_errors_need_no_more_than_some_of_the_points():
    """The function is one number at all points, however many they are."""
    draws = {"a": normal(1.0, 0.5, 400), "nuts": normal(0.0, 1.0, 400, seed=1)}
    few, many = (
        bdl.compare(shift, draws, torch.zeros(n, 1), torch.zeros(n)).numbers()["a"]
        for n in (5, 350)
    )
    for key in ("mean_error", "wasserstein", "energy", "mmd", "kl"):
        assert many[f"{key}_se"] == pytest.approx(few[f"{key}_se"], rel=1e-6), key


def test_an_sd_of_nan_is_not_zero():
    values = torch.tensor([[0.0, 1.0, 3.0], [float("nan"), 1.0, 5.0]])
    assert torch.equal(sd_of_draws(values)[1:], torch.tensor([0.0, 1.0]).double())
    assert sd_of_draws(values)[0].isnan()


def test_a_test_point_far_from_the_others_does_not_make_their_sds_rounding():
    """The sds of the others stay 1 and 0.3 in float32, where numbers of 1e8 are 8 apart; those of
    latents of other sizes too."""
    torch.manual_seed(0)
    b = torch.randn(200, 30)
    far, a = 1e8 * (torch.arange(30) == 0), 0.3 * b
    draws = {name: bdl.PredictiveDraws(f + far) for name, f in (("a", a), ("nuts", b))}
    found = bdl.compare(shift, draws, torch.zeros(30, 1), torch.zeros(30), progress=False)
    row, judgment = found.numbers()["a"], found.judgments["a"]
    assert row["sd_ratio"] == pytest.approx(0.3, rel=1e-6) and judgment.group == "far"
    assert row["far_at"] > 0.7 and judgment.fault == "too narrow"
    assert (sd_of_draws(torch.stack([b[:, 0], 1e8 + 99 * b[:, 0]], 1)) > 0.9).all()


def test_a_doubtful_reference_is_told_once_and_first():
    good, draws = normal(0.0, 1.0), {"a": normal(0, 0.5)}
    diverging = torch.zeros(4, 1000, dtype=torch.bool)
    diverging[0, :100] = True
    bad = bdl.Samples(good.latents, {"diverging": diverging})
    found = bdl.compare(shift, draws | {"nuts": bad}, X, Y)
    text = str(found)
    assert len(found.warnings) == 1 and "2.5 % of the draws diverged" in found.warnings[0]
    assert "nuts (doubtful)" in text and "Warning: nuts cannot be trusted" in text
    assert text.count("trusted") == 1 and text.index("trusted") < text.index("distance to nuts")
    assert "trusted" not in found.verdicts["a"]
    fine = bdl.compare(shift, draws | {"nuts": good}, X, Y)
    assert not fine.warnings and "doubtful" not in str(fine) and "trusted" not in str(fine)


def test_a_shift_of_the_mean_is_in_root_mean_square_sds():
    """Sds of 1 and 3 at two points, both means off by 0.6: 0.6 / sqrt((1 + 9) / 2)."""
    draws = torch.special.ndtri((torch.arange(4000.0).double() + 0.5) / 4000)[:, None]
    sds = torch.tensor([1.0, 3.0]).double()
    found = distances(of_draws(sds * draws + 0.6), of_draws(sds * draws))
    noise = 2 / 4000  # which is taken off
    assert found["mean_shift"] == pytest.approx(math.sqrt(0.36 / 5 - noise), rel=1e-3)


def test_the_draws_resolve_the_expected_distance_and_two_and_a_half_errors():
    side = of_draws(torch.randn(1000, 1).expand(1000, 2))
    assert resolved(side, side, 0.1) - resolved(side, side, 0.0) == pytest.approx(0.25)


@pytest.mark.parametrize("count, known", [(4, False), (5, True)])
def test_a_region_has_five_points(count, known):
    mask = torch.arange(9) < count
    side = replace(of_draws(torch.randn(100, 9)), regions={"near": mask})
    assert ("sd_ratio_near" in sd_ratios(side, side)) == known


@pytest.mark.parametrize("scale, share", [(1.0, 0.0), (0.9, 0.0), (0.05, 1.0)])
def test_probabilities_near_zero_have_no_high_k_hat_by_their_skewness(scale, share):
    """A ratio of Normals at skewed draws had a k-hat above 0.7 at half of the points of one law."""
    torch.manual_seed(0)
    a, b = (torch.randn(400, 60).exp() for _ in range(2))
    assert distances(of_draws(scale * a), of_draws(b))["khat_high"] == pytest.approx(share, abs=0.1)


def test_agreement_at_all_points_has_an_error_over_the_points():
    p = torch.tensor([0.9, 0.1]).expand(200, 30, 2) + 0.01 * torch.randn(200, 30, 1) * torch.tensor(
        [1.0, -1.0]
    )
    side = replace(of_draws(p), task="classification")
    found = distances(side, side)
    assert found["agreement"] == 1.0
    assert found["agreement_se"] == pytest.approx((32 * 2 / 34**3) ** 0.5)

"""Verdicts follow from the numbers."""

import math

import pytest

from pyro_bdl.comparison.verdicts import verdict

FLOOR = {"mean_shift": 0.1}


NUTS = {"posterior": "nuts", "high_k": 0, "loo_by": "draws"}


def said(reference=NUTS, **row):
    return verdict({"posterior": "q"} | row, reference=reference, floor=FLOOR, points=100)


@pytest.mark.parametrize(
    "ratio, words",
    [
        (0.0, "the function has no spread where"),
        (0.521, "the function's sd is 0.52 times the reference's on average: overconfident about"),
        (0.97, "the function's sd is 0.97 times the reference's on average: much alike"),
        (1.5, "the function's sd is 1.50 times the reference's on average: underconfident about"),
        (9.12, "the function's sd is 9.1 times the reference's on average: underconfident about"),
    ],
)
def test_spread(ratio, words):
    assert words in said(sd_ratio=ratio)


@pytest.mark.parametrize(
    "shift, words",
    [
        (0.2, "its mean agrees"),
        (0.5, "off by 0.50 sd of the reference"),
        (3.0, "off by 3.0 sd of the"),
    ],
)
def test_center(shift, words):
    assert words in said(mean_shift=shift)


def test_a_mean_within_the_noise_of_the_reference_agrees():
    row = {"posterior": "q", "mean_shift": 0.6}
    found = verdict(row, reference=NUTS, floor={"mean_shift": 0.5}, points=9)
    assert found == "its mean agrees"


@pytest.mark.parametrize(
    "ratio, error, words",
    [
        (0.6, 0.25, "times the reference's on average, ± 0.25 from too few draws: undecided"),
        (0.6, 0.1, "overconfident about the function"),
        (1.5, 0.3, "± 0.30 from too few draws: undecided"),
        (0.97, 0.5, "much alike"),
        (0.6, math.nan, "overconfident about the function"),
    ],
)
def test_a_ratio_that_is_noise_decides_nothing(ratio, error, words):
    text = said(sd_ratio=ratio, sd_ratio_se=error)
    assert text.endswith(words) and ("confident" in text) == ("confident" in words)


@pytest.mark.parametrize(
    "coverage, words",
    [
        (0.6, "holds 60 % of the test targets: too narrow"),
        (0.99, "too wide"),
        (0.87, "no farther from 90 % than chance"),
    ],
)
def test_coverage(coverage, words):
    assert words in said(reference=None, coverage=coverage)


def test_coverage_within_what_one_function_may_give():
    row = {"coverage_from": 0.7, "coverage_to": 0.995}
    assert "no farther from 90 % than chance" in said(reference=None, coverage=0.75, **row)
    assert "no farther from 90 % than chance" in said(reference=None, coverage=0.99, **row)
    assert "too narrow" in said(reference=None, coverage=0.65, **row)
    assert "too wide" in said(reference=None, coverage=1.0, **row)


@pytest.mark.parametrize(
    "row, words",
    [
        (
            {"rhat": 1.2, "ess_min": 9.0, "divergences": 0},
            "not converged (R-hat 1.20 in function space), ESS at least 9, no divergences: it "
            "needs longer warm-up and more draws",
        ),
        (
            {"rhat": 1.03},
            "nearly converged (R-hat 1.030 in function space): it needs longer warm-up and more",
        ),
        (
            {"rhat": 1.001, "ess_min": 812.3, "divergences": 0},
            "converged (R-hat 1.001 in function space), ESS at least 812, no divergences",
        ),
        ({"rhat": 1.001, "divergences": 1}, "; 1 divergence: draws may miss parts"),
        ({"divergences": 3}, "convergence unknown: R-hat needs two chains; 3 divergences"),
    ],
)
def test_convergence(row, words):
    assert words in said(**row)


def test_without_numbers_nothing_is_claimed():
    assert said() == "nothing to hold it against"
    own = verdict(NUTS | {"sd_ratio": 0.1}, reference=NUTS, floor=None, points=9)
    assert own == "the reference: nothing to hold it against"


@pytest.mark.parametrize(
    "row, words",
    [
        (
            {"sd_ratio_near": 0.95, "sd_ratio_between": 0.1, "sd_ratio": 0.6},
            "the function's sd between the training data is 0.10 times the reference's: "
            "overconfident about the function there (0.95 times near them)",
        ),
        (
            {"sd_ratio_near": 1.0, "sd_ratio_beyond": 3.0, "sd_ratio": 2.0},
            "the function's sd beyond the training data is 3.0 times the reference's: "
            "underconfident about the function there",
        ),
        (
            {"sd_ratio_near": 0.5, "sd_ratio_between": 0.45, "sd_ratio": 0.5},
            "the function's sd is 0.50 times the reference's on average: overconfident about",
        ),
        ({"sd_ratio_near": 0.95, "sd_ratio_between": 0.9, "sd_ratio": 0.93}, "much alike"),
        (
            {"sd_ratio_between": 0.5, "sd_ratio_beyond": 0.1, "sd_ratio": 0.5},
            "the function's sd beyond the training data is 0.10 times the reference's",
        ),
    ],
)
def test_the_region_where_the_sd_is_most_off_is_named(row, words):
    assert said(**row).startswith(words) or (words == "much alike" and words in said(**row))


@pytest.mark.parametrize(
    "row, words",
    [
        ({"elpd_diff": -12.0}, "worse than the reference, by 12.0 ± 3.0"),
        ({"elpd_diff": 9.0}, "better than the reference"),
        ({"elpd_diff": 9.0, "loo_by": "p / q"}, "better than the reference"),
        ({"elpd_diff": -5.0}, ""),
        ({"elpd_diff": -12.0, "high_k": 7}, ""),
        ({"elpd_diff": 12.0, "loo_by": "plain"}, ""),  # of data that it was fitted to
        ({"elpd_diff": 12.0, "reference": NUTS | {"high_k": 1}}, ""),
    ],
)
def test_left_out_data_count_where_they_can_be_relied_on(row, words):
    text = said(**{"sd_ratio": 1.0, "elpd_diff_se": 3.0, "high_k": 0, "loo_by": "draws"} | row)
    assert words in text and ("left-out" in text) == bool(words)

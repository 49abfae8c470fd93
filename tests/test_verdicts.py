"""Verdicts follow from the numbers."""

import pytest

from pyro_bdl.verdicts import verdict

FLOOR = {"mean_shift": 0.1}


def said(reference="nuts", **row):
    return verdict({"posterior": "q"} | row, reference=reference, floor=FLOOR, points=100)


@pytest.mark.parametrize(
    "ratio, words",
    [
        (0.0, "no spread at all"),
        (0.521, "sd is 0.52 of nuts's on average: overconfident"),
        (0.97, "sd is 0.97 of nuts's on average: much alike"),
        (1.5, "sd is 1.50 of nuts's on average: underconfident"),
        (9.12, "sd is 9.1 times nuts's on average: underconfident"),
    ],
)
def test_spread(ratio, words):
    assert words in said(sd_ratio=ratio)


@pytest.mark.parametrize(
    "shift, words",
    [(0.2, "its mean agrees"), (0.5, "off by 0.50 of nuts's sd"), (3.0, "off by 3.0 times")],
)
def test_centre(shift, words):
    assert words in said(mean_shift=shift)


def test_a_mean_within_the_noise_of_the_reference_agrees():
    row = {"posterior": "q", "mean_shift": 0.6}
    assert verdict(row, reference="r", floor={"mean_shift": 0.5}, points=9) == "its mean agrees"


@pytest.mark.parametrize(
    "coverage, words",
    [
        (0.6, "holds 60% of the test targets: too narrow"),
        (0.99, "too wide"),
        (0.87, "as it should"),
    ],
)
def test_coverage(coverage, words):
    assert words in said(reference=None, coverage=coverage)


@pytest.mark.parametrize(
    "row, words",
    [
        ({"rhat": 1.2, "divergences": 0}, "not converged (R-hat 1.20"),
        ({"rhat": 1.03, "divergences": 0}, "nearly converged (R-hat 1.030"),
        (
            {"rhat": 1.001, "ess_min": 812.3, "divergences": 0},
            "converged (R-hat 1.001 in function space), ESS at least 812, no divergences",
        ),
        ({"rhat": 1.001, "divergences": 1}, "; 1 divergence: draws may miss parts"),
        ({"divergences": 3}, "convergence unknown; 3 divergences"),
    ],
)
def test_convergence(row, words):
    assert words in said(**row)


def test_without_numbers_nothing_is_claimed():
    assert said() == "nothing to hold it against"
    own = verdict({"posterior": "nuts", "sd_ratio": 0.1}, reference="nuts", floor=None, points=9)
    assert own == "nothing to hold it against"

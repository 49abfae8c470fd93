"""Tables as text."""

import math

import pytest

from pyro_bdl.comparison.columns import Column, number, to_text

COLUMNS = [
    Column("name", "posterior", style="text"),
    Column("rmse", "RMSE", "prediction"),
    Column("cover", "90 %", "prediction", style="percent"),
    Column("rhat", "R-hat", digits=4),
]
ROWS = [
    {"name": "map", "rmse": 55.333, "cover": 0.7123, "rhat": math.nan},
    {"name": "mean-field", "rmse": 1234.5, "cover": None, "rhat": 1.0042},
]


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0"),
        (1.0, "1"),
        (0.012345, "0.0123"),
        (1e-4, "0.000100"),
        (-55.55, "-55.5"),
        (123456.7, "123457"),
        (1.2345e9, "1.23e+09"),
        (math.inf, "inf"),
    ],
)
def test_number(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    "style, value, error, text",
    [
        ("number", 53.2345, 3.912, "53 ± 4"),
        ("number", 5.3981, 0.0123, "5.398 ± 0.012"),
        ("number", 5.3981, 0.97, "5.4 ± 1.0"),
        ("number", 12345.0, 130.0, "12340 ± 130"),
        ("number", -0.004, 0.5, "0.0 ± 0.5"),
        ("number", 1.234, 0.0, "1.23"),
        ("number", 1.2e9, 3e8, "1.20e+09 ± 3.0e+08"),
        ("number", 8.976, math.nan, "8.98 ± ?"),
        ("number", None, 1.0, "–"),
        ("percent", 0.9143, 0.0312, "91.4 ± 3.1 %"),
        ("percent", 0.9143, 0.0512, "91 ± 5 %"),
        ("percent", 0.9143, None, "91.4 ± ? %"),
    ],
)
def test_digits_follow_the_error(style, value, error, text):
    assert Column("a", "a", style=style, error="e").cell({"a": value, "e": error}) == text


def test_text_is_aligned_under_groups():
    lines = to_text(ROWS, COLUMNS).splitlines()
    assert lines == [
        "             prediction",
        "posterior          RMSE     90 %   R-hat",
        "────────────────────────────────────────",
        "map                55.3   71.2 %       –",
        "mean-field         1234        –   1.004",
    ]


@pytest.mark.parametrize("width, blocks", [(40, 1), (39, 2), (32, 2), (25, 3), (10, 3)])
def test_what_is_wider_goes_below(width, blocks):
    tables = to_text(ROWS, COLUMNS, width).split("\n\n")
    assert len(tables) == blocks and all("mean-field" in table for table in tables)
    assert " ".join(tables).count("prediction") == max(1, blocks - 1)

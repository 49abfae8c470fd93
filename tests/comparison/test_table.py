"""Evaluations that are compared belong to the same data."""

import pytest
import torch
from helpers.comparisons import GRID, line, weights

import pyro_bdl as bdl

Y = GRID[:, 0]


def scored(x=GRID, y=Y, seed=0, **options):
    return bdl.evaluate(line, weights(2, seed=seed), x, y, **options)


def test_evaluations_from_files_give_the_table_of_compare(tmp_path):
    posteriors = {"a": weights(2), "b": weights(2, seed=1)}
    files = {name: bdl.evaluate(line, q, GRID, Y).save(tmp_path / name)
             for name, q in posteriors.items()}  # fmt: skip
    found = bdl.compare_evaluations({n: bdl.Evaluation.load(f) for n, f in files.items()}, "a")
    whole = bdl.compare(line, posteriors, GRID, Y, reference="a")
    numbers = [side.numbers()["b"] for side in (found, whole)]
    for key in ("nlpd", "rmse", "wasserstein", "nlpd_diff", "nlpd_diff_se"):
        assert numbers[0][key] == numbers[1][key]


OTHERS = {
    "inputs": lambda: scored(x=GRID.flip(0).contiguous()),
    "targets": lambda: scored(y=Y + 1e-3),
    "units": lambda: scored(units=(2.0, 0.0)),
    "shift": lambda: scored(units=(1.0, 3.0)),
    "rows": lambda: scored(x=GRID[:-1], y=Y[:-1]),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_evaluations_on_other_data_are_refused(other):
    with pytest.raises(ValueError, match=r"'b' was evaluated (at|on) other .*same test data"):
        bdl.compare_evaluations({"a": scored(), "b": other()}, "a")


def test_rounding_is_no_other_data():
    exact = scored(x=GRID.double(), y=Y.double(), units=(3.0, 1.0))
    found = bdl.compare_evaluations({"a": exact, "b": scored(units=(3.0, 1.0))})
    assert len(found.judgments) == 2


def test_cross_validation_stands_in_the_place_of_leave_one_out():
    fold = bdl.KFold(1.0, 1.0, torch.ones(9), torch.zeros(9, dtype=torch.int64), Y)
    options = {"reference": None, "train": (GRID, Y), "left_out": {"a": fold}}
    found = bdl.compare(line, {"a": weights(2)}, GRID, Y, **options)
    assert found.numbers()["a"]["elpd_loo"] == 1.0

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


def test_an_unknown_reference_and_none_at_all():
    with pytest.raises(ValueError, match="'nuts' is not among the evaluations"):
        bdl.compare_evaluations({"a": scored()}, "nuts")
    with pytest.raises(ValueError, match="give at least one"):
        bdl.compare_evaluations({})


def fold(rows=9, y=Y):
    return bdl.KFold(1.0, 1.0, torch.ones(rows), torch.zeros(rows, dtype=torch.int64), y)


@pytest.mark.parametrize(
    "left_out, words",
    [
        ({"typo": fold()}, "left_out 'typo' is not among the posteriors"),
        ({"a": fold(7, Y[:7])}, "cross-validation of 7 rows, but train has 9"),
        ({"a": fold(y=Y + 1)}, "cross-validation of other targets"),
    ],
)
def test_cross_validation_is_of_a_posterior_and_of_the_training_data(left_out, words):
    data = GRID, Y
    with pytest.raises(ValueError, match=words):
        bdl.compare(line, {"a": weights(2)}, *data, reference=None, train=data, left_out=left_out)
    right = {"a": fold()}
    found = bdl.compare(line, {"a": weights(2)}, *data, reference=None, train=data, left_out=right)
    assert found.numbers()["a"]["elpd_loo"] == 1.0

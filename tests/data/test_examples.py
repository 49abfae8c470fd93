"""The built-in problems."""

import pytest
import torch

from pyro_bdl.data import EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_problems_are_finite_and_say_where_they_come_from(name):
    data = EXAMPLES[name].load(0.2, 0, None)
    assert data.source and data.split
    for part in (data.x_train, data.x_test, data.y_train, data.y_test):
        assert bool(part.isfinite().all())
    assert len(data.x_train) == len(data.y_train) and len(data.x_test) == len(data.y_test)
    point = data.point(3)
    assert list(point["inputs"]) == list(data.feature_names)
    other = EXAMPLES[name].load(0.2, 1, None)
    assert not torch.equal(data.x_train[:20], other.x_train[:20])


def test_points_are_rows_of_the_source():
    from sklearn.datasets import load_diabetes

    data = EXAMPLES["diabetes"].load(0.2, 0, None)
    source = load_diabetes(scaled=False)
    for place in (0, 40):
        point = data.point(place)
        row = point["row"] - 1
        assert list(point["inputs"].values()) == pytest.approx(source.data[row], rel=1e-4)
        assert point["target"] == pytest.approx(source.target[row], rel=1e-4)


def test_counts_are_counts():
    y = EXAMPLES["counts"].load(0.2, 0, None).y_train
    assert bool((y == y.round()).all()) and float(y.min()) >= 0 and float(y.mean()) > 2


def test_folds_part_the_rows():
    rows = [EXAMPLES["breast-cancer"].load(0.2, 0, (i, 5)).test_rows for i in range(5)]
    assert sorted(row for part in rows for row in part) == list(range(1, 570))

"""The built-in problems."""

import pytest
import torch

from pyro_bdl.data.examples import EXAMPLES, two_clusters


@pytest.mark.parametrize("name", EXAMPLES)
def test_problems_are_finite_and_say_where_they_come_from(name):
    data = EXAMPLES[name].load(test_fraction=0.2, seed=0, fold=None)
    assert data.source and data.split and len(repr(data)) < 100
    for part in (data.x_train, data.x_test, data.y_train, data.y_test):
        assert bool(part.isfinite().all())
    assert len(data.x_train) == len(data.y_train) and len(data.x_test) == len(data.y_test)
    assert list(data.point(3)["inputs"]) == list(data.feature_names)
    other = EXAMPLES[name].load(test_fraction=0.2, seed=1, fold=None)
    assert not torch.equal(data.x_train[:20], other.x_train[:20])


def test_points_are_rows_of_the_source():
    from sklearn.datasets import load_diabetes

    data, source = EXAMPLES["diabetes"].load(), load_diabetes(scaled=False)
    for place in (0, 40):
        point = data.point(place)
        row = point["row"] - 1
        assert list(point["inputs"].values()) == pytest.approx(source.data[row], rel=1e-4)
        assert point["target"] == pytest.approx(source.target[row], rel=1e-4)


def test_counts_are_counts():
    y = EXAMPLES["counts"].load().y_train
    assert bool((y == y.round()).all()) and float(y.min()) >= 0 and float(y.mean()) > 2


def test_two_clusters():
    data = two_clusters(50, seed=1)
    x = data.x_train.squeeze(-1)
    assert ((x >= -1) & (x <= -0.7)).sum() == 25
    assert ((x >= 0.5) & (x <= 1)).sum() == 25
    clean = two_clusters(50, seed=1, noise=0.0)
    torch.testing.assert_close(clean.y_train, torch.cos(4 * x + 0.8))
    assert 0.05 < (data.y_train - clean.y_train).std() < 0.2
    with pytest.raises(ValueError, match="n must be at least 2, got 1"):
        two_clusters(1)


def test_the_folds_of_a_simulated_problem_are_of_its_training_rows():
    whole = EXAMPLES["counts"].load()
    folds = [EXAMPLES["counts"].load(fold=(i, 5)) for i in range(5)]
    assert {len(fold.y_train) for fold in folds} == {96}
    for fold in folds:
        rows = torch.cat([fold.x_train, fold.x_test]).sort(0).values
        torch.testing.assert_close(rows, whole.x_train.sort(0).values)
    tests = torch.cat([fold.x_test for fold in folds])
    torch.testing.assert_close(tests.sort(0).values, whole.x_train.sort(0).values)

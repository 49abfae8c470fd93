"""Arrays are checked, split, filled in and standardized as documented."""

import numpy as np
import pytest
import torch

from pyro_bdl.data.dataset import prepare
from pyro_bdl.errors import BdlWarning


def split(x, y=None, **options):
    """The data set of one feature, beside a column of noise."""
    y = np.random.default_rng(1).standard_normal(len(x)) if y is None else y
    x = np.column_stack([x, np.arange(len(x))])
    return prepare(x, y, **{"feature_names": ("a", "b"), **options})


def test_standardized_with_the_training_part_and_back():
    x, y = np.random.default_rng(0).normal(3, 5, (2, 100))
    data = split(x, y, test_fraction=0.25, seed=3)
    assert data.task == "regression" and data.x_train.shape == (75, 2)
    torch.testing.assert_close(data.x_train.mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(data.x_train.std(0, correction=0), torch.ones(2))
    torch.testing.assert_close(data.y_train.std(correction=0), torch.tensor(1.0))
    assert abs(data.y_test.mean()) > 1e-4
    for place, row in enumerate(data.test_rows):
        point = data.point(place)
        assert point["row"] == row and point["target"] == pytest.approx(y[row - 1], abs=1e-4)
        expected = {"a": pytest.approx(x[row - 1], abs=1e-4), "b": pytest.approx(row - 1, abs=1e-3)}
        assert point["inputs"] == expected
        assert data.point_name(place) == f"row {row}, target {y[row - 1]:.3g}"


def test_the_split_follows_the_seed_and_folds_part_the_rows():
    x = np.arange(40.0)
    first, same, other = (split(x, seed=seed).test_rows for seed in (1, 1, 2))
    assert first == same != other and len(first) == 8
    for y in (None, np.arange(40) % 3):
        rows = [split(x, y, task=None, fold=(i, 5)).test_rows for i in range(5)]
        assert sorted(row for part in rows for row in part) == list(range(1, 41))


def test_every_class_is_in_the_training_part():
    y = np.array(["common"] * 95 + ["rare"] * 4 + ["single"])
    for seed in range(20):
        data = split(np.arange(100.0), y, seed=seed)
        assert set(data.y_train.tolist()) == {0, 1, 2} and data.y_train.dtype == torch.int64
        assert len(data.y_test) == 20


@pytest.mark.parametrize(
    "column",
    [
        np.full(40, 7.1),
        1e8 + 1e-8 * (np.arange(40) % 2),
        np.where(np.arange(40) % 3, 0.3, 0.1 + 0.2),
        1e-200 * np.arange(1.0, 41.0),
    ],
    ids=["constant", "nearly_equal", "last_digit", "underflow"],
)
def test_a_column_that_differs_by_rounding_alone_is_constant(column):
    words = "constant in the training part, so set to zero: 'a'"
    with pytest.warns(BdlWarning, match=words) as caught:
        data = split(column)
    assert len(caught) == 1 and not data.x_train[:, 0].any() and not data.x_test[:, 0].any()


def test_a_small_but_real_spread_is_kept(recwarn):
    data = split(1e9 + np.arange(40.0))
    assert data.x_train[:, 0].std(correction=0) == pytest.approx(1.0, abs=1e-3)
    assert not recwarn.list


def test_counts_are_not_standardized():
    counts = np.arange(20) % 7
    data = split(np.arange(20.0) ** 2, counts, task="count")
    assert data.task == "count" and (data.y_mean, data.y_sd) == (0.0, 1.0)
    assert sorted([*data.y_train.tolist(), *data.y_test.tolist()]) == sorted(counts)


@pytest.mark.parametrize("how", ["mean", "median", "most_frequent"])
def test_missing_values_are_filled_in_from_the_training_rows(how):
    x = np.random.default_rng(0).normal(size=40)
    x[[3, 8, 20]] = np.nan
    data = split(x, impute=how)
    assert bool(data.x_train.isfinite().all()) and bool(data.x_test.isfinite().all())
    assert "3 missing values filled in" in data.notes[-1]
    if how == "mean":  # which is zero after standardization
        train = sorted(set(range(40)) - {row - 1 for row in data.test_rows})
        filled = [i for i, row in enumerate(train) if row in (3, 8, 20)]
        assert filled and data.x_train[filled, 0].abs().max() < 1e-6


def test_to_moves_every_tensor():
    data = split(np.arange(20.0)).to("meta")
    assert {t.device.type for t in vars(data).values() if isinstance(t, torch.Tensor)} == {"meta"}


X, Y = np.arange(40.0), np.arange(40) ** 2 / 7


def changed(values, row, value):
    return np.where(np.arange(len(values)) == row, value, values)


def gap_before(y, task, value=0.5):
    """The fourth target has this value, behind one that is missing and left out."""
    y = changed(changed(y, 1, np.nan), 3, value)
    return split(X, y, task=task, missing_targets=True)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: prepare(X, Y, feature_names=["a"]), r"\(40,\)"),
        (lambda: split(X, Y, feature_names=["a"]), "and 1 names"),
        (lambda: split(X[:5], Y[:5]), "there are 5 rows; at least 10"),
        (lambda: split(X, Y, task="ranking"), "task must be one of .* got 'ranking'"),
        (lambda: split(X, Y, impute="none"), "impute must be one of .* got 'none'"),
        (lambda: split(X, Y, test_fraction=20), "test_fraction=20"),
        (lambda: split(X, Y, test_fraction=0.999), r"leaves 1 of the 40 rows to learn from"),
        (lambda: split(X, X % 2, test_fraction=0.999), r"leaves 2 of the 40 rows to learn from"),
        (lambda: split(X[:10], X[:10] % 5), "0 for the test"),
        (lambda: split(X, Y, fold=(0, 41)), "n_splits=41 greater"),
        (lambda: split(X, X % 2, fold=(0, 21)), "n_splits=21 cannot be greater"),
        (lambda: split(X, changed(Y, 2, np.nan), impute="mean"), "row 3: 'y'"),
        (lambda: split(changed(X, 2, np.nan), Y), r"row 3: 'a'.*--impute"),
        (lambda: split(changed(X, 0, 1e30), Y), "row 1: 'a'; correct them"),
        (lambda: split(X, changed(Y, 0, -np.inf)), "row 1: 'y'; correct them"),
        (lambda: split(np.where(X < 12, np.nan, X), Y), "row 5: 'a' and 7 more"),
        (lambda: split(X, np.full(40, 4.0)), "constant"),
        (lambda: split(X, 1e9 + 1e-3 * X), r"mean 1e\+09 and sd .*float32 cannot resolve"),
        (lambda: split(X, np.full(40, "u")), "single class 'u'"),
        (lambda: split(X, X.astype(str)), "40 different values"),
        (lambda: split(X, changed(X, 0, 0.5), task="count"), r"not hold counts \(0.5 in row 1\)"),
        (lambda: gap_before(X, "count"), r"not hold counts \(0.5 in row 4\)"),
        (lambda: gap_before(X / 99, "share"), r"not hold shares between 0 and 1 \(0 in row 1\)"),
        (lambda: gap_before(X / 99 + 0.2, "share", 7.5), r"0 and 1 \(7.5 in row 4\)"),
        (
            lambda: gap_before(X.astype(str).astype(object), None, "u"),
            r"'0.0' in row 1\) in 39 rows",
        ),
        (lambda: split(X, fold=(5, 5)), r"fold=\(5, 5\).*0 <= i < k"),
        (lambda: split(X, fold=(-1, 5)), r"fold=\(-1, 5\).*0 <= i < k"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(ValueError, match=words):
        make()

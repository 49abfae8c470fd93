"""Data sets are split, standardized and refused as documented."""

import numpy as np
import pytest
import torch

from pyro_bdl.data import load_csv, load_default, prepare, two_clusters
from pyro_bdl.errors import BdlWarning


@pytest.fixture
def write(tmp_path):
    def write_text(text, name="data.csv", encoding="utf-8"):
        path = tmp_path / name
        path.write_text(text, encoding=encoding)
        return path

    return write_text


def table(header, *columns, separator=","):
    rows = (separator.join(map(str, row)) for row in zip(*columns, strict=True))
    return "\n".join([header, *rows]) + "\n"


NUMBERS = [round(0.3 * i**2 - i, 2) for i in range(20)]


def test_default_is_standardized_with_the_training_part():
    data = load_default(seed=3)
    assert data.task == "regression"
    assert data.x_train.shape == (354, 10) and data.x_test.shape == (88, 10)
    assert len(data.feature_names) == 10
    torch.testing.assert_close(data.x_train.mean(0), torch.zeros(10), atol=1e-5, rtol=0)
    torch.testing.assert_close(data.x_train.std(0, correction=0), torch.ones(10))
    torch.testing.assert_close(data.y_train.std(correction=0), torch.tensor(1.0))
    assert abs(data.y_test.mean()) > 1e-4
    targets = torch.cat([data.in_units(data.y_train), data.in_units(data.y_test)])
    from sklearn.datasets import load_diabetes

    expected = torch.as_tensor(np.sort(load_diabetes().target), dtype=torch.float32)
    torch.testing.assert_close(targets.sort().values, expected, atol=1e-3, rtol=0)


def test_split_follows_the_seed():
    first, same, other = load_default(seed=1), load_default(seed=1), load_default(seed=2)
    assert torch.equal(first.x_test, same.x_test)
    assert not torch.equal(first.x_test, other.x_test)


def test_csv_regression_keeps_rows_together(write):
    x = np.arange(20.0)
    path = write(table("a,b,y", x, x**2, 3 * x + 1.5))
    data = load_csv(path, "y", test_fraction=0.25)
    assert data.task == "regression"
    assert data.feature_names == ("a", "b")
    assert len(data.y_test) == 5 and len(data.y_train) == 15
    for part_x, part_y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        torch.testing.assert_close(part_x[:, 0], part_y, atol=1e-5, rtol=0)


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_separators_and_byte_order_mark(write, separator):
    header = separator.join(["a", "b", "y"])
    text = table(header, range(20), NUMBERS, NUMBERS, separator=separator)
    data = load_csv(write(text, encoding="utf-8-sig"), "y", separator=separator)
    assert data.feature_names == ("a", "b")


def test_separators_within_quotes_do_not_count(write):
    text = table('"price, EUR";"size, m2";y', NUMBERS, range(20), NUMBERS, separator=";")
    data = load_csv(write(text), "y", separator=";")
    assert data.feature_names == ("price, EUR", "size, m2")


def test_text_and_few_integers_are_classes(write):
    words = ["no", "yes", "maybe", "yes"] * 5
    data = load_csv(write(table("a,y", NUMBERS, words)), "y")
    assert data.task == "classification"
    assert data.class_names == ("maybe", "no", "yes")
    assert data.y_train.dtype == torch.int64
    data = load_csv(write(table("a,y", NUMBERS, [3, 10, 10, 5] * 5)), "y")
    assert data.class_names == ("3", "5", "10")
    data = load_csv(write(table("a,y", NUMBERS, [3, 10, 10, 5] * 5)), "y", "regression")
    assert data.task == "regression" and data.class_names == ()
    data = load_csv(write(table("a,y", NUMBERS, range(20))), "y")
    assert data.task == "regression"


def test_every_class_is_in_the_training_part():
    rng = np.random.default_rng(0)
    y = np.array(["common"] * 95 + ["rare"] * 4 + ["single"])
    for seed in range(20):
        data = prepare(rng.standard_normal((100, 2)), y, feature_names="ab", seed=seed)
        assert set(data.y_train.tolist()) == {0, 1, 2}
        assert len(data.y_test) == 20


def test_one_hot(write):
    colors = ["red", "blue"] * 10
    path = write(table("a,color,y", NUMBERS, colors, NUMBERS))
    data = load_csv(path, "y", one_hot=True)
    assert data.feature_names == ("a", "color=blue", "color=red")
    torch.testing.assert_close(data.x_train[:, 1], -data.x_train[:, 2])


def test_text_is_encoded_and_filled_in_as_the_training_rows_have_it(write):
    """A text of the test part alone has no column, and a missing one is the most frequent."""
    rows = {row - 1 for row in load_csv(write(table("a,y", NUMBERS, NUMBERS)), "y").test_rows}
    train = sorted(set(range(20)) - rows)
    colors = ["new" if row in rows else ("red", "red", "blue")[row % 3] for row in range(20)]
    colors[train[0]], colors[train[1]] = "red", ""
    path = write(table("color,a,y", colors, NUMBERS, NUMBERS))
    data = load_csv(path, "y", one_hot=True, impute="mean")
    assert data.feature_names == ("a", "color=blue", "color=red")
    red = data.x_train[:, 2] > 0
    assert red[0] and red[1]
    is_new = (data.x_test * torch.tensor(data.x_sd) + torch.tensor(data.x_mean))[:, 1:]
    torch.testing.assert_close(is_new, torch.zeros(4, 2), atol=1e-6, rtol=0)


def test_constant_column_becomes_zero(write):
    path = write(table("a,flat,y", NUMBERS, [7.1] * 20, NUMBERS))
    with pytest.warns(BdlWarning, match="'flat'") as caught:
        data = load_csv(path, "y")
    assert len(caught) == 1
    assert torch.equal(data.x_train[:, 1], torch.zeros(16))
    assert torch.equal(data.x_test[:, 1], torch.zeros(4))


def split(x, y=None, **options):
    """The data set of one feature, beside a column of noise."""
    y = np.random.default_rng(1).standard_normal(len(x)) if y is None else y
    x = np.column_stack([x, np.arange(len(x))])
    return prepare(x, y, feature_names=("a", "b"), **options)


@pytest.mark.parametrize(
    "column",
    [
        1e8 + 1e-8 * (np.arange(40) % 2),
        np.where(np.arange(40) % 3, 0.3, 0.1 + 0.2),
        1e-200 * np.arange(1.0, 41.0),
    ],
    ids=["nearly_equal", "last_digit", "underflow"],
)
def test_a_column_that_differs_by_rounding_alone_is_constant(column):
    with pytest.warns(BdlWarning, match="constant in the training part, so set to zero: 'a'"):
        data = split(column)
    assert not data.x_train[:, 0].any() and not data.x_test[:, 0].any()


def test_a_small_but_real_spread_is_kept(recwarn):
    data = split(1e9 + np.arange(40.0))
    assert data.x_train[:, 0].std(correction=0) == pytest.approx(1.0, abs=1e-3)
    assert not recwarn.list


@pytest.mark.parametrize("size", [1e300, 1e30])
@pytest.mark.parametrize("column", ["a", "y"])
def test_numbers_that_would_overflow_are_named(size, column):
    """A feature of 1e30 in the training part sets the sd, one in the test part lies 1e30 sds away;
    targets are scored in their own units."""
    refused = 0
    for row in range(12):
        x, y = np.random.default_rng(0).standard_normal((2, 12))
        (x if column == "a" else y)[row] = size
        try:
            data = split(x, y)
        except ValueError as error:
            assert f"row {row + 1}: '{column}'" in str(error)
            refused += 1
        else:
            assert data.x_train.isfinite().all() and data.x_test.abs().max() < 1e9
    assert refused == (2 if size == 1e30 and column == "a" else 12)


@pytest.mark.parametrize("y", [np.arange(40.0), np.arange(40) % 2])
def test_a_test_part_that_leaves_nothing_to_learn_from(y):
    with pytest.raises(ValueError, match=r"test_fraction=0.999 .* leaves [02] of the 40 rows"):
        split(np.arange(40.0), y, test_fraction=0.999)
    assert len(split(np.arange(40.0), y, test_fraction=0.85).y_train) >= 5


def test_two_clusters():
    data = two_clusters(50, seed=1)
    x = data.x_train.squeeze(-1)
    assert ((x >= -1) & (x <= -0.7)).sum() == 25
    assert ((x >= 0.5) & (x <= 1)).sum() == 25
    clean = two_clusters(50, seed=1, noise=0.0)
    torch.testing.assert_close(clean.y_train, torch.cos(4 * x + 0.8))
    assert 0.05 < (data.y_train - clean.y_train).std() < 0.2
    assert torch.equal(two_clusters(50, seed=1).y_train, data.y_train)
    with pytest.raises(ValueError, match="n=1"):
        two_clusters(1)


def test_to_moves_every_tensor():
    data = two_clusters(4).to("meta")
    assert {t.device.type for t in (data.x_train, data.y_train, data.x_test, data.y_test)} == {
        "meta"
    }


def commas(numbers):
    return [str(number).replace(".", ",") for number in numbers]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_decimal_commas(write, separator):
    """In a column, in the target, beside whole and missing numbers, and in quotes."""
    first, target = [*NUMBERS[:-1], 7], [1e-3 * i + 0.25 for i in range(20)]
    whole, label = [i % 7 for i in range(20)], ["u, v" if i % 2 else "w" for i in range(20)]
    texts = [f'"{text}"' for text in label]
    with_commas = [[f'"{entry}"' for entry in commas(column)] for column in (first, target)]
    header = separator.join("abcy")
    points = table(header, first, whole, texts, target, separator=separator)
    given = table(header, with_commas[0], whole, texts, with_commas[1], separator=separator)
    options = {"one_hot": True, "separator": separator}
    expected = load_csv(write(points, "points.csv"), "y", **options)
    data = load_csv(write(given, "commas.csv"), "y", decimal=",", **options)
    assert data.feature_names == expected.feature_names == ("a", "b", "c=u, v", "c=w")
    assert torch.equal(data.x_train, expected.x_train)
    assert torch.equal(data.y_train, expected.y_train)
    missing = given.replace(with_commas[0][4], "", 1)
    with pytest.raises(ValueError, match="row 5: 'a'"):
        load_csv(write(missing), "y", decimal=",", **options)


def european(numbers):
    """1234.5 as 1.234,5"""
    return [f"{number:,}".translate(str.maketrans(",.", ".,")) for number in numbers]


def test_thousands_are_what_the_user_says(write):
    """950, 1.101 and 1.252 are 950, 1101 and 1252 if points are said to separate thousands, and
    refused if commas are said to be decimal marks and no more."""
    price, size = [950 + 151 * i for i in range(20)], [1200.5 - 99 * i for i in range(20)]
    said = {"separator": ";", "decimal": ","}
    text = table("price;size;y", european(price), european(size), commas(NUMBERS), separator=";")
    with pytest.raises(ValueError, match=r"'price' \('1.101' in row 2\).*--thousands"):
        load_csv(write(text), "y", **said)
    data = load_csv(write(text), "y", **said, thousands=".")
    for place in range(len(data.y_test)):
        point = data.point(place)
        row = point["row"] - 1
        assert point["inputs"]["price"] == pytest.approx(price[row], rel=1e-5)
        assert point["inputs"]["size"] == pytest.approx(size[row], abs=1e-3)


@pytest.mark.parametrize("entry", ["1.5", "01.03.2024", "12.34.567", "1.2345"])
def test_marks_of_thousands_stand_between_groups_of_three(write, entry):
    """With points for thousands 1.5 is not 15, and 01.03.2024 not 1032024."""
    text = table("a;y", [entry, *range(1, 20)], commas(NUMBERS), separator=";")
    with pytest.raises(ValueError, match=f"'a' .'{entry}' in row 1"):
        load_csv(write(text), "y", separator=";", decimal=",", thousands=".")


CODES = {
    "flights": ["1A", "2P", "12A", "3P"],
    "ranges": ["1-2", "3-4", "5-6"],
    "fractions": ["1/2", "3/4"],
    "places": ["1st", "2nd", "3rd"],
    "letters": ["T5", "T6"],
    "names": ["April", "May", "June"],
    "words": ["now", "today"],
    "days": ["2024-01-01", "2024-01-02"],
}


@pytest.mark.parametrize("kind", CODES)
def test_text_is_never_read_as_dates(write, kind):
    codes = (CODES[kind] * 20)[:20]
    path = write(table("a,code,y", NUMBERS, codes, NUMBERS))
    data = load_csv(path, "y", one_hot=True)
    assert data.feature_names == ("a", *(f"code={code}" for code in sorted(set(codes))))
    with pytest.raises(ValueError, match=f"not numeric: 'code' .'{codes[0]}' in row 1.*--dates"):
        load_csv(path, "y")
    if kind != "days":
        with pytest.raises(ValueError, match=f"'code' .* has '{codes[0]}' in row 1; write dates"):
            load_csv(path, "y", dates=["code"])


BAD_FILES = {
    "empty": ("", "y", {}, "empty"),
    "header only": ("a,y\n", "y", {}, "no rows"),
    "one column": ("y\n" + "1\n" * 20, "y", {}, "only the column 'y'"),
    "ragged": ("a,y\n1,2\n1,2,3\n", "y", {}, "line 3"),
    "repeated": (table("a,a,y", NUMBERS, NUMBERS, NUMBERS), "y", {}, "columns named 'a'"),
    "unnamed": (table(",a,y", NUMBERS, NUMBERS, NUMBERS), "y", {}, "column 1 .* no name"),
    "near miss": (table("age,price", NUMBERS, NUMBERS), "Price", {}, "did you mean 'price'"),
    "no such": (table("age,price", NUMBERS, NUMBERS), "zzz", {}, "it has 'age', 'price'"),
    "text": (
        table("a,b,c,y", NUMBERS, ["u", "v"] * 10, ["1", "?"] * 10, NUMBERS),
        "y",
        {},
        r"'b' \('u' in row 1\), 'c' \('\?' in row 2\).*--one-hot",
    ),
    "names one-hot": (
        table("a,b,y", NUMBERS, [f"n{i}" for i in range(20)], NUMBERS),
        "y",
        {"one_hot": True},
        "'b' has 20 different texts",
    ),
    "missing": (
        table("a,b,y", [1, "", *NUMBERS[2:]], [1, "inf", *NUMBERS[2:]], NUMBERS),
        "y",
        {},
        "row 2: 'a', 'b'",
    ),
    "empty column": (
        table("a,b,y", NUMBERS, [""] * 20, NUMBERS),
        "y",
        {"impute": "mean"},
        "nothing in column 'b'; remove",
    ),
    "counts of text": (
        table("a,y", NUMBERS, ["u", "v"] * 10),
        "y",
        {"task": "count"},
        r"'y' is not numeric \('u' in row 1\).*--task classification",
    ),
    "folds": (table("a,y", NUMBERS, NUMBERS), "y", {"fold": (0, 21)}, "21 folds .* for 20 rows"),
    "folds of classes": (
        table("a,y", NUMBERS, ["u", "v"] * 10),
        "y",
        {"fold": (0, 11)},
        "11 folds .* too many for 10 rows of the largest class",
    ),
    "missing text": (
        table("a,b,y", NUMBERS, ["u", "", "v", "v"] * 5, NUMBERS),
        "y",
        {"one_hot": True},
        "row 2: 'b'; row 6",
    ),
    "missing target": (table("a,y", NUMBERS, ["NA", *NUMBERS[1:]]), "y", {}, "row 1: 'y'"),
    "missing class": (table("a,y", NUMBERS, ["u", "", "v", "v"] * 5), "y", {}, "row 2: 'y'"),
    "text among numbers": (table("a,y", NUMBERS, ["?", *NUMBERS[1:]]), "y", {}, r"'\?' in row 1"),
    "text regression": (
        table("a,y", NUMBERS, ["u", "v"] * 10),
        "y",
        {"task": "regression"},
        "not numeric",
    ),
    "decimal commas": (
        table("a;y", ["3,14", *NUMBERS[1:]], NUMBERS, separator=";"),
        "y",
        {"separator": ";"},
        r"not numeric: 'a' \('3,14' in row 1\).*--decimal",
    ),
    "semicolons": (
        table("a;y", commas(NUMBERS), NUMBERS, separator=";"),
        "y",
        {},
        "only the column 'a;y'.*--separator",
    ),
    "one mark for two": (
        table("a,y", NUMBERS, NUMBERS),
        "y",
        {"thousands": "."},
        "decimal='.' .* another one than thousands='.'",
    ),
    "no such dates": (
        table("a,y", NUMBERS, NUMBERS),
        "y",
        {"dates": ["day"]},
        "no feature 'day'",
    ),
    "constant": (table("a,y", NUMBERS, [4] * 20), "y", {}, "constant"),
    "not resolved": (
        table("a,y", NUMBERS, [1e9 + 1e-3 * i for i in range(20)]),
        "y",
        {},
        r"mean 1e\+09 and sd .*float32 cannot resolve: subtract",
    ),
    "too large": (
        table("a,y", NUMBERS, [1e300 * i for i in range(20)]),
        "y",
        {},
        "numbers too large",
    ),
    "one class": (table("a,y", NUMBERS, ["u"] * 20), "y", {}, "single class 'u'"),
    "all different": (
        table("a,y", NUMBERS, [f"n{i}" for i in range(20)]),
        "y",
        {},
        "20 different values",
    ),
    "dates": (
        table("a,y", NUMBERS, [f"2024-01-{i:02d}" for i in range(1, 21)]),
        "y",
        {},
        "'2024-01-01' in row 1.* make it numbers",
    ),
    "few rows": (table("a,y", NUMBERS[:5], NUMBERS[:5]), "y", {}, "there are 5 rows; at least"),
    "task": (table("a,y", NUMBERS, NUMBERS), "y", {"task": "ranking"}, "task='ranking'"),
    "fraction": (table("a,y", NUMBERS, NUMBERS), "y", {"test_fraction": 20}, "test_fraction=20"),
    "few of each": (
        table("a,y", NUMBERS[:10], ["u", "v", "w", "x", "z"] * 2),
        "y",
        {},
        "too few rows for a test part",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_is_refused(write, case):
    text, target, options, message = BAD_FILES[case]
    with pytest.raises(ValueError, match=message):
        load_csv(write(text), target, **options)


def test_what_was_found_is_said(write):
    few = table("a,y", NUMBERS, [i % 4 for i in range(20)])
    (note,) = load_csv(write(few), "y").notes
    assert "4 different whole numbers" in note and "--task count" in note and "4 classes" in note
    assert load_csv(write(few), "y", "regression").notes == ()
    (note,) = load_csv(write(table("a,y", NUMBERS, NUMBERS)), "y").notes
    assert "a regression" in note


def test_a_column_that_counts_the_rows_is_said(write):
    data = load_csv(write(table("id,a,y", range(7, 27), NUMBERS, NUMBERS)), "y")
    assert data.notes[0] == "id counts the rows; remove it if it is no more than that."
    data = load_csv(write(table("id,a,y", [1, *range(1, 20)], NUMBERS, NUMBERS)), "y")
    assert not any("counts the rows" in note for note in data.notes)


def test_counts_are_not_standardized(write):
    counts = [i % 7 for i in range(20)]
    data = load_csv(write(table("a,y", NUMBERS, counts)), "y", "count")
    assert data.task == "count" and (data.y_mean, data.y_sd) == (0.0, 1.0)
    assert sorted([*data.y_train.tolist(), *data.y_test.tolist()]) == sorted(counts)
    with pytest.raises(ValueError, match=r"'y' does not hold counts .*row 1.*--task regression"):
        load_csv(write(table("a,y", NUMBERS, [0.5, *counts[1:]])), "y", "count")


def test_dates_are_expanded_into_the_parts_that_differ(write):
    dates = [f"2024-{1 + i % 3:02d}-{1 + i:02d}" for i in range(20)]
    data = load_csv(write(table("day,y", dates, NUMBERS)), "y", dates=["day"])
    assert data.feature_names == ("day.month", "day.day", "day.day_of_week")
    point = data.point(0)
    row = point["row"] - 1
    assert point["inputs"]["day.month"] == pytest.approx(1 + row % 3, abs=1e-4)
    assert point["inputs"]["day.day"] == pytest.approx(1 + row, abs=1e-4)
    assert any("day is expanded into day.month" in note for note in data.notes)


@pytest.mark.parametrize(
    "a, y, can_impute", [("", 1, True), ("inf", 1, False), (1, "", False)], ids=str
)
def test_filling_in_is_offered_where_it_helps(write, a, y, can_impute):
    path = write(table("a,y", [a, *NUMBERS[1:]], [y, *NUMBERS[1:]]))
    with pytest.raises(ValueError, match="row 1: ") as told:
        load_csv(path, "y")
    assert ("--impute" in str(told.value)) == can_impute


@pytest.mark.parametrize("how", ["mean", "median", "most_frequent"])
def test_missing_values_are_filled_in_from_the_training_rows(how):
    random = np.random.default_rng(0)
    x = random.normal(size=(40, 3))
    full = x.copy()
    x[[3, 8, 20], 0] = np.nan
    data = prepare(x, full.sum(1), feature_names=["a", "b", "c"], impute=how)
    assert bool(data.x_train.isfinite().all()) and bool(data.x_test.isfinite().all())
    assert "3 missing values filled in" in data.notes[-1] and "(a 3)" in data.notes[-1]
    if how == "mean":  # which is zero after standardization
        train = sorted(set(range(40)) - {row - 1 for row in data.test_rows})
        filled = [i for i, row in enumerate(train) if row in (3, 8, 20)]
        assert filled and data.x_train[filled, 0].abs().max() < 1e-6


def test_imputation_is_of_features_only_and_by_name():
    x, y = np.ones((20, 1)), np.arange(20.0)
    with pytest.raises(ValueError, match="impute='none' is unknown"):
        prepare(x, y, feature_names=["a"], impute="none")
    with pytest.raises(ValueError, match="row 3: 'y'"):
        prepare(x, np.where(y == 2, np.nan, y), feature_names=["a"], impute="mean")


def test_long_lists_are_cut(write):
    path = write(table("a,y", [""] * 12 + NUMBERS[12:], NUMBERS))
    with pytest.raises(ValueError, match="row 5: 'a' and 7 more"):
        load_csv(path, "y")


def test_no_file_and_no_text(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.csv"):
        load_csv(tmp_path / "nothing.csv", "y")
    with pytest.raises(IsADirectoryError, match="is a folder; name a CSV file"):
        load_csv(tmp_path, "y")
    (tmp_path / "latin.csv").write_bytes("a,größe\n1,2\n".encode("latin-1"))
    with pytest.raises(ValueError, match="UTF-8"):
        load_csv(tmp_path / "latin.csv", "y")


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"\(20,\)"):
        prepare(np.zeros(20), np.zeros(20), feature_names=["a"])
    with pytest.raises(ValueError, match="1 names for 2 columns"):
        prepare(np.zeros((20, 2)), np.zeros(20), feature_names=["a"])

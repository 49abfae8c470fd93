"""CSV files are read as the user says they are written, and refused with column and row."""

import re

import pytest
import torch

from pyro_bdl.data import load_csv

NUMBERS = [round(0.3 * i**2 - i, 2) for i in range(20)]


@pytest.fixture
def write(tmp_path):
    def write_text(text, name="data.csv", encoding="utf-8"):
        path = tmp_path / name
        path.write_text(text, encoding=encoding)
        return path

    return write_text


def table(header, *columns, separator=","):
    rows = (separator.join(map(str, row)) for row in zip(*columns, strict=True))
    return "\n".join([separator.join(header), *rows]) + "\n"


def commas(numbers):
    return [str(number).replace(".", ",") for number in numbers]


def european(numbers):
    """1234.5 as 1.234,5"""
    return [f"{number:,}".translate(str.maketrans(",.", ".,")) for number in numbers]


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_separators_quotes_and_byte_order_mark(write, separator):
    header = ['"price, EUR"', '"size; m2"', "y"]
    text = table(header, range(20), NUMBERS, NUMBERS, separator=separator)
    data = load_csv(write(text, encoding="utf-8-sig"), "y", separator=separator)
    assert data.feature_names == ("price, EUR", "size; m2") and data.task == "regression"
    torch.testing.assert_close(data.x_train[:, 1], data.y_train)  # rows stay together
    assert "data.csv" in data.source and data.notes[0].startswith("price, EUR counts the rows")


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_decimal_commas(write, separator):
    """Decimal commas in a column, in the target, beside whole numbers, and in quotes."""
    first, target = [*NUMBERS[:-1], 7], [1e-3 * i + 0.25 for i in range(20)]
    whole, text = [i % 7 for i in range(20)], ['"u, v"' if i % 2 else "w" for i in range(20)]
    a, y = ([f'"{entry}"' for entry in commas(column)] for column in (first, target))
    options = {"one_hot": True, "separator": separator}
    points = write(table("abcy", first, whole, text, target, separator=separator), "points.csv")
    expected = load_csv(points, "y", **options)
    written = write(table("abcy", a, whole, text, y, separator=separator))
    data = load_csv(written, "y", decimal=",", **options)
    assert data.feature_names == expected.feature_names == ("a", "b", "c=u, v", "c=w")
    assert torch.equal(data.x_train, expected.x_train)
    assert torch.equal(data.y_train, expected.y_train)


def test_thousands_are_what_the_user_says(write):
    """950, 1.101 and 1.252 are 950, 1101 and 1252 if points are said to separate thousands, and
    refused if commas are said to be decimal marks and no more."""
    price, size = [950 + 151 * i for i in range(20)], [1200.5 - 99 * i for i in range(20)]
    said = {"separator": ";", "decimal": ","}
    text = table(
        ("price", "size", "y"), european(price), european(size), commas(NUMBERS), separator=";"
    )
    with pytest.raises(ValueError, match=r"'price' \('1.101' in row 2\).*--thousands"):
        load_csv(write(text), "y", **said)
    data = load_csv(write(text), "y", **said, thousands=".")
    for place, row in enumerate(data.test_rows):
        inputs = data.point(place)["inputs"]
        assert inputs["price"] == pytest.approx(price[row - 1], rel=1e-5)
        assert inputs["size"] == pytest.approx(size[row - 1], abs=1e-3)


@pytest.mark.parametrize("entry", ["1.5", "01.03.2024", "12.34.567", "1.2345"])
def test_marks_of_thousands_stand_between_groups_of_three(write, entry):
    """With points for thousands 1.5 is not 15, and 01.03.2024 not 1032024."""
    text = table("ay", [entry, *range(1, 20)], commas(NUMBERS), separator=";")
    with pytest.raises(ValueError, match=f"'a' .'{entry}' in row 1"):
        load_csv(write(text), "y", separator=";", decimal=",", thousands=".")


CODES = ["1A", "1-2", "1/2", "1st", "T5", "May", "now", "today", "2024-01-01"]


@pytest.mark.parametrize("code", CODES)
def test_text_is_never_read_as_dates(write, code):
    path = write(table(("a", "code", "y"), NUMBERS, [code, "X"] * 10, NUMBERS))
    data = load_csv(path, "y", one_hot=True)
    assert set(data.feature_names) == {"a", f"code={code}", "code=X"}
    torch.testing.assert_close(data.x_train[:, 1], -data.x_train[:, 2])
    with pytest.raises(ValueError, match=f"not numeric: 'code' .'{code}' in row 1.*--dates"):
        load_csv(path, "y")
    row = 2 if code == "2024-01-01" else 1
    with pytest.raises(ValueError, match=f"'code' has .* in row {row}; write dates"):
        load_csv(path, "y", dates=["code"])


def test_dates_are_expanded_into_the_parts_that_differ(write):
    dates = [f"2024-{1 + i % 3:02d}-{1 + i:02d}" for i in range(20)]
    data = load_csv(write(table(("day", "y"), dates, NUMBERS)), "y", dates=["day"])
    assert data.feature_names == ("day.month", "day.day", "day.day_of_week")
    row, inputs = data.test_rows[0] - 1, data.point(0)["inputs"]
    assert inputs["day.month"] == pytest.approx(1 + row % 3, abs=1e-4)
    assert inputs["day.day"] == pytest.approx(1 + row, abs=1e-4)


def test_text_is_encoded_and_filled_in_as_the_training_rows_have_it(write):
    """A text of the test part alone has no column, and a missing one is the most frequent."""
    rows = {row - 1 for row in load_csv(write(table("ay", NUMBERS, NUMBERS)), "y").test_rows}
    train = sorted(set(range(20)) - rows)
    colors = ["new" if row in rows else ("red", "red", "blue")[row % 3] for row in range(20)]
    colors[train[0]], colors[train[1]] = "red", ""
    path = write(table(("color", "a", "y"), colors, NUMBERS, NUMBERS))
    data = load_csv(path, "y", one_hot=True, impute="mean")
    assert data.feature_names == ("a", "color=blue", "color=red")
    red = data.x_train[:, 2] > 0
    assert red[0] and red[1]
    is_new = (data.x_test * torch.tensor(data.x_sd) + torch.tensor(data.x_mean))[:, 1:]
    torch.testing.assert_close(is_new, torch.zeros(4, 2), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "y, task, found, classes, words",
    [
        (["no", "yes", "maybe", "yes"], None, "classification", ("maybe", "no", "yes"), "text, 3"),
        ([3, 10, 10, 5], None, "classification", ("3", "5", "10"), "3 classes; .*--task count"),
        ([3, 10, 10, 5], "regression", "regression", (), ""),
        ([3.5, 10, 10, 5], None, "regression", (), "a regression"),
    ],
)
def test_the_task_is_found_from_the_target_and_said(write, y, task, found, classes, words):
    data = load_csv(write(table("ay", NUMBERS, y * 5)), "y", task)
    assert (data.task, data.class_names) == (found, classes)
    assert len(data.notes) == bool(words) and re.search(words, "".join(data.notes))


def test_the_index_of_a_table_is_left_out(write):
    named = load_csv(write(table("ay", NUMBERS, NUMBERS)), "y")
    data = load_csv(write(table(["", "a", "y"], range(20), NUMBERS, NUMBERS)), "y")
    assert data.feature_names == ("a",) and torch.equal(data.x_train, named.x_train)
    assert "no name" in data.notes[0]


@pytest.mark.parametrize("where", ["header and rows", "rows", "header"])
def test_a_mark_at_the_end_of_lines_makes_no_column(write, where):
    named = load_csv(write(table("ay", NUMBERS, NUMBERS)), "y")
    header, *rows = table("ay", NUMBERS, NUMBERS).splitlines()
    header += "," * ("header" in where)
    rows = [row + "," * ("rows" in where) for row in rows]
    data = load_csv(write("\n".join([header, *rows])), "y")
    assert data.feature_names == ("a",) and torch.equal(data.x_train, named.x_train)


def test_spaces_around_entries_are_cut(write):
    texts, classes = ["no", "no ", " yes", "yes  "] * 5, ["u ", "u", "v\t", "v"] * 5
    data = load_csv(write(table((" b ", "y "), texts, classes)), "y", one_hot=True)
    assert data.feature_names == ("b=no", "b=yes") and data.class_names == ("u", "v")


TEXTS = ["NA", "None", "null", "nan", "Pave"] * 4


def test_texts_such_as_na_are_categories(write):
    path = write(table("aby", NUMBERS, TEXTS, TEXTS))
    data = load_csv(path, "y", one_hot=True, impute="median")
    levels = sorted(set(TEXTS))
    assert data.feature_names == ("a", *(f"b={level}" for level in levels))
    assert list(data.class_names) == levels
    notes = "".join(data.notes)
    assert "b: 'NA' is a category of its own, in 4 rows" in notes and "filled in" not in notes


@pytest.mark.parametrize("text", ["NA", "None", "null", "NaN", "n/a", "N/A", ""])
def test_among_numbers_they_are_missing(write, text):
    """And in a column of dates: filled in as an empty cell is."""
    days = [f"2024-03-{1 + row:02}" for row in range(20)]
    read = []
    for entry in (text, ""):
        numbers, dates = [*NUMBERS[:-1], entry], [*days[:-1], entry]
        path = write(table("abdy", numbers, NUMBERS, dates, NUMBERS))
        read.append(load_csv(path, "y", impute="mean", dates=["d"]))
    assert torch.equal(read[0].x_train, read[1].x_train)
    # the number, the day and the weekday
    assert "3 missing values filled in with the mean" in "".join(read[0].notes)


def test_declared_texts_are_missing_in_every_column(write):
    texts, numbers = ["?", "u", "v", "v", "v"] * 4, [*NUMBERS[:-1], "?"]
    path = write(table("aby", numbers, texts, NUMBERS))
    options = {"one_hot": True, "impute": "median"}
    with pytest.raises(ValueError, match=r"'a' holds numbers but for '\?' in row 20.*--missing"):
        load_csv(path, "y", **options)
    data = load_csv(path, "y", missing=["?"], **options)
    assert data.feature_names == ("a", "b=u", "b=v")
    notes = "".join(data.notes)
    assert "4 missing values filled in with the most frequent text" in notes
    assert "1 missing values filled in with the median" in notes


@pytest.mark.parametrize("kind", ["numbers", "classes"])
def test_rows_without_a_target_are_left_out_if_it_is_said(write, kind):
    y = ["", *NUMBERS[1:7], "NA", *NUMBERS[8:]] if kind == "numbers" else ["", "u", "v", "v"] * 5
    out = [row for row, entry in enumerate(y, 1) if entry in ("", "NA")]
    kept = [row for row in range(1, 21) if row not in out]
    data = load_csv(write(table("ay", NUMBERS, y)), "y", missing_targets=True)
    assert f"{len(out)} of 20 rows have no y and are left out." in data.notes
    assert len(data.y_train) + len(data.y_test) == len(kept)
    assert set(data.test_rows) <= set(kept)
    for row, x in zip(data.test_rows, data.x_test, strict=True):  # their numbers in the file
        assert x.item() * data.x_sd[0] + data.x_mean[0] == pytest.approx(
            float(NUMBERS[row - 1]), abs=1e-4
        )


REFUSALS = {
    "no table of text in UTF-8": [("", "y", {}), ("a,y\n1,2\n1,2,3\n", "y", {})],
    "there are 0 rows": [("a,y\n", "y", {})],
    "only the column 'a;y'.*--separator": [(table("ay", NUMBERS, NUMBERS, separator=";"), "y", {})],
    "give each its own name": [
        (table("aay", NUMBERS, NUMBERS, NUMBERS), "y", {}),
        (table(["a", "", "y"], NUMBERS, NUMBERS, NUMBERS), "y", {}),
    ],
    "did you mean 'price'": [(table(["age", "price"], NUMBERS, NUMBERS), "Price", {})],
    "it has 'a', 'y'": [
        (table("ay", NUMBERS, NUMBERS), "zzz", {}),
        (table("ay", NUMBERS, NUMBERS), "y", {"dates": ["zzz"]}),
    ],
    r"'b' \('u' in row 1\), 'c' \('\?' in row 2\).*--one-hot": [
        (table("abcy", NUMBERS, ["u", "v"] * 10, ["1", "?"] * 10, NUMBERS), "y", {})
    ],
    "'a' .'3,14' in row 1.*--decimal": [
        (table("ay", ["3,14", *NUMBERS[1:]], NUMBERS, separator=";"), "y", {"separator": ";"})
    ],
    "'b' has 20 different texts": [
        (table("aby", NUMBERS, [f"n{i}" for i in range(20)], NUMBERS), "y", {"one_hot": True})
    ],
    "row 2: 'b'; row 6": [
        (table("aby", NUMBERS, ["u", "", "v", "v"] * 5, NUMBERS), "y", {"one_hot": True})
    ],
    "row 2: 'y'": [(table("ay", NUMBERS, ["u", "", "v", "v"] * 5), "y", {})],
    "row 1: 'y'.*left out by missing_targets=True .--missing-targets": [
        (table("ay", NUMBERS, ["NA", *NUMBERS[1:]]), "y", {})
    ],
    r"'y' is not numeric .'(\?|u)' in row 1.*--task classification": [
        (table("ay", NUMBERS, ["?", *NUMBERS[1:]]), "y", {}),
        (table("ay", NUMBERS, ["u", "v"] * 10), "y", {"task": "count"}),
    ],
    "decimal='.' .* another one than thousands='.'": [
        (table("ay", NUMBERS, NUMBERS), "y", {"thousands": "."})
    ],
    "separator='::'": [(table("ay", NUMBERS, NUMBERS), "y", {"separator": "::"})],
}


@pytest.mark.parametrize(
    "words, case", [(w, case) for w, cases in REFUSALS.items() for case in cases]
)
def test_refusals(write, words, case):
    text, target, options = case
    with pytest.raises(ValueError, match=words):
        load_csv(write(text), target, **options)


def test_no_file_and_no_text(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.csv"):
        load_csv(tmp_path / "nothing.csv", "y")
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        load_csv(tmp_path, "y")
    (tmp_path / "latin.csv").write_bytes("a,größe\n1,2\n".encode("latin-1"))
    with pytest.raises(ValueError, match="UTF-8"):
        load_csv(tmp_path / "latin.csv", "y")

"""CSV files as data sets, with errors that name column and row."""

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pyro_bdl.data.dataset import CENSORED, Dataset, prepare, quoted
from pyro_bdl.utils.validation import require

_MIN_TEXTS = 10  # up to this many different texts are always turned into indicators
_DATE = r"\d{4}-\d{1,2}-\d{1,2}.*"
_MISSING = ("na", "n/a", "nan", "null", "none", "<na>", "#n/a")  # where all else are numbers
_PARTS = ("year", "month", "day", "day_of_week", "hour", "minute")


def load_csv(
    path: str | Path,
    target: str,
    task: str | None = None,
    *,
    separator: str = ",",
    decimal: str = ".",
    thousands: str | None = None,
    dates: Sequence[str] = (),
    missing: Sequence[str] = (),
    one_hot: bool = False,
    status: str | None = None,
    upper: str | None = None,
    **options: Any,
) -> Dataset:
    """Read a CSV file with a header; every column but the target is a feature.

    How numbers and dates are written is not guessed: it is said here. Spaces around entries are
    cut. Empty cells are missing values; in columns of numbers and dates NA, NaN, null, None and
    N/A, in small or capital letters, are too. In columns of categories these are values like
    others.

    :param path: the file.
    :param target: name of the target column.
    :param task: as of :func:`prepare`; if None it is found from the target: text, or whole numbers
        with at most 10 distinct values, are classes. The data set's ``notes`` say what was found.
    :param separator: the character between columns.
    :param decimal: the mark before decimals.
    :param thousands: the mark between groups of three digits; None: there is none.
    :param dates: columns of dates such as 2024-12-31 or 2024-12-31 23:59. They become year, month,
        day, weekday, hour and minute, as far as these differ between rows.
    :param missing: texts that stand for missing values in every column, such as ``["NA", "?"]``.
    :param one_hot: turn each column of text into one column of zeros and ones for each of its
        values in the training part, named ``column=value``.
    :param status: of censored targets the column that says how each is known: 0, it is larger than
        its value; 1, it is the value; 2, it is smaller; 3, it is between the value and ``upper``,
        the column of upper ends, of which other rows say nothing.
    :param options: ``impute``, ``test_fraction``, ``seed`` and ``fold``, see :func:`prepare`.
    :raises OSError: if there is no such file.
    :raises ValueError: if the file is no table in UTF-8 with a header of different names; if the
        target is not among the columns; if a feature is not numeric or a date is not written as
        above; if the status of censored targets is missing; and in the cases of :func:`prepare`.
    """
    if len(decimal) != 1 or thousands == decimal:
        raise ValueError(
            f"decimal={decimal!r} (--decimal) must be one character and another one than "
            f"thousands={thousands!r} (--thousands)"
        )
    frame, notes = _table(path, separator, missing)
    of_target = [name for name in (target, status, upper) if name is not None]
    if (status is None) == (task in CENSORED) or (upper is not None and status is None):
        raise ValueError(
            "status: a column that says how the targets are known (--status) and censored targets "
            "(--likelihood censored_normal, censored_lognormal or censored_weibull) need each "
            f"other; status is {status!r}, upper {upper!r}, and the task {task!r}"
        )
    if len(set(of_target)) < len(of_target):
        raise ValueError(f"target, status and upper must be three columns, got {quoted(of_target)}")
    for name in (*of_target, *dates):
        if name not in frame.columns:
            near = difflib.get_close_matches(name, frame.columns, n=3, cutoff=0.5)
            hint = f"did you mean {quoted(near)}?" if near else f"it has {quoted(frame.columns)}"
            raise ValueError(f"data: {path} has no column {name!r}; {hint}")
    numbers = frame.apply(_numbers, decimal=decimal, thousands=thousands)
    usual = frame.apply(lambda column: column.str.lower()).isin(_MISSING)
    is_text = numbers.isna() & frame.notna()
    of_numbers = numbers.notna().any() & ~(is_text & ~usual).any()
    is_text &= ~of_numbers
    if not one_hot:
        _refuse_texts(frame, is_text.drop(columns=[*of_target, *dates]), path)
    features: dict[str, pd.Series] = {}
    for name in frame.columns.drop(of_target):
        if name in dates:
            features |= _date_parts(frame[name].mask(usual[name]))
        elif is_text[name].any():
            if is_text[name].sum() < numbers[name].notna().sum():
                raise ValueError(
                    f"data: column {name!r} holds numbers but for "
                    f"{_first(frame[name], is_text[name])}; correct it, or name texts that stand "
                    "for missing values with missing= (--missing)"
                )
            features[name] = _few_texts(frame[name])
            notes += _values_of_their_own(frame[name], usual[name])
        else:
            features[name] = numbers[name]
            if (numbers[name].diff()[1:] == 1).all():
                notes.append(f"{name} counts the rows; remove it if it is no more than that.")
    y = numbers[target]
    if is_text[target].any():
        mostly_numbers = is_text[target].sum() < y.notna().sum()
        if task != "classification" and (task is not None or mostly_numbers):
            place = _first(frame[target], is_text[target])
            raise ValueError(
                f"target: column {target!r} is not numeric ({place}); correct it, or say "
                "task='classification' (--task classification)"
            )
        y = frame[target].astype(object)
        notes += _values_of_their_own(frame[target], usual[target])
    targets = y.to_numpy()
    if status is not None:
        targets = _censored(frame[of_target], numbers[of_target], usual[of_target])
    made = prepare(
        pd.DataFrame(features), targets,
        feature_names=tuple(features), target_name=target, task=task, **options,
    )  # fmt: skip
    return replace(made, source=f"the file {path}", notes=(*notes, *made.notes))


def _censored(frame: pd.DataFrame, numbers: pd.DataFrame, usual: pd.DataFrame) -> np.ndarray:
    """The columns of censored targets: value, status and, if there is one, upper end.

    :param usual: where the text is one that stands for a missing value.
    """
    for name in frame.columns[1:]:
        if (text := numbers[name].isna() & frame[name].notna() & ~usual[name]).any():
            raise ValueError(
                f"data: column {name!r} is not numeric ({_first(frame[name], text)}); correct it"
            )
    known = numbers.to_numpy()
    if known.shape[1] == 3 and not (known[:, 1] == 3).any():
        raise ValueError(
            f"upper: no row has the status 3, of an interval, so that column "
            f"{frame.columns[2]!r} (--upper) says nothing: leave it out"
        )
    return known


def read_csv(path: str | Path, separator: str = ",") -> pd.DataFrame:
    """Read all columns as text, empty cells as NaN.

    :param separator: the character between columns.
    :raises OSError: if there is no such file.
    :raises ValueError: for a file that is no table in UTF-8 with a header of different names.
    """
    return _table(path, separator)[0]


def _table(
    path: str | Path, separator: str, missing: Sequence[str] = ()
) -> tuple[pd.DataFrame, list[str]]:
    """The columns as text, missing entries as NaN, and notes on what was left out."""
    hint = f"if its columns are not parted by {separator!r}, say separator= (--separator)"
    if len(separator) != 1:
        raise ValueError(f"separator={separator!r} (--separator) must be one character")
    require(path, (str, os.PathLike), "path must be a string or a Path")
    # the header is read as a row: pandas would rename repeated columns
    read = partial(
        pd.read_csv, path, header=None, dtype=str, sep=separator, skipinitialspace=True,
        keep_default_na=False, encoding="utf-8-sig",
    )  # fmt: skip
    try:
        width = read(nrows=1).shape[1]
        table = read(names=range(width + 1))  # a mark behind the last column makes one more
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise ValueError(f"data: {path} is no table of text in UTF-8 ({error}); {hint}") from error
    table = table.apply(lambda column: column.str.strip())
    longer = np.flatnonzero(table[width].fillna("") != "")
    if len(longer):
        raise ValueError(
            f"data: {path} is no table of text in UTF-8 (row {longer[0]} has more entries than the "
            f"header); {hint}"
        )
    header, table = table.iloc[0], table.iloc[1:]
    table = table.mask(table.isin(["", *missing])).reset_index(drop=True)
    empty = table.columns[(header == "") & table.isna().all()]
    table, notes = table.drop(columns=empty), []
    if len(table.columns) > 1 and header[0] == "" and 0 in table.columns:
        table = table.drop(columns=0)
        notes.append("The first column has no name, as a table's index, and is left out.")
    names = list(header[table.columns])
    if "" in names or len(set(names)) < len(names):
        raise ValueError(f"data: {path} has the columns {quoted(names)}: give each its own name")
    if len(names) == 1:
        raise ValueError(f"data: {path} has only the column {names[0]!r}; {hint}")
    return table.set_axis(names, axis=1), notes


def _values_of_their_own(column: pd.Series, usual: pd.Series) -> list[str]:
    """A note on categories that could be meant as missing values."""
    return [
        f"{column.name}: {text!r} is a category of its own, in {count} rows; if it stands for a "
        f"missing value, say --missing {text}."
        for text, count in column[usual].value_counts().items()
    ]


def _numbers(column: pd.Series, decimal: str, thousands: str | None) -> pd.Series:
    """Text as numbers; NaN where it is missing or no number.

    pandas' own ``thousands`` would read 12.34.567 as 1234567.
    """
    text = column
    if thousands is not None:
        groups = rf"[+-]?\d{{1,3}}({re.escape(thousands)}\d{{3}})+({re.escape(decimal)}\d*)?"
        grouped = text.str.fullmatch(groups, na=False)
        text = text.mask(grouped, text.str.replace(thousands, "", regex=False))
    if decimal != ".":
        text = text.str.translate(str.maketrans({".": "?", decimal: "."}))
    return pd.to_numeric(text, errors="coerce").astype(float)


def _refuse_texts(frame: pd.DataFrame, is_text: pd.DataFrame, path: str | Path) -> None:
    names = is_text.columns[is_text.any()]
    if len(names):
        texts = [f"{name!r} ({_first(frame[name], is_text[name])})" for name in names]
        raise ValueError(
            f"data: {path} has columns that are not numeric: {', '.join(texts)}; remove them, "
            "leave cells without a value empty, say how numbers are written with decimal= and "
            "thousands= (--decimal, --thousands), name columns of dates with dates= (--dates), or "
            "turn texts into columns of zeros and ones with one_hot=True (--one-hot)"
        )


def _first(column: pd.Series, chosen: pd.Series) -> str:
    """The first chosen entry and its row, counted from 1."""
    row = int(np.flatnonzero(chosen)[0])
    return f"{column[row]!r} in row {row + 1}"


def _few_texts(column: pd.Series) -> pd.Series:
    count = column.nunique()
    if count > max(_MIN_TEXTS, len(column) // 2):
        raise ValueError(
            f"data: column {column.name!r} has {count} different texts in {len(column)} rows, too "
            "many for columns of zeros and ones; remove it"
        )
    return column.astype(object)


def _date_parts(column: pd.Series) -> dict[str, pd.Series]:
    """The parts of dates that differ between rows, as numbers; the year if none does."""
    written = column.where(column.str.fullmatch(_DATE, na=False))
    dates = pd.to_datetime(written, format="ISO8601", errors="coerce", utc=True)
    if (column.notna() & dates.isna()).any():
        raise ValueError(
            f"dates: column {column.name!r} has {_first(column, column.notna() & dates.isna())}; "
            "write dates as 2024-12-31 or 2024-12-31 23:59"
        )
    parts = {f"{column.name}.{part}": getattr(dates.dt, part).astype(float) for part in _PARTS}
    year = f"{column.name}.year"
    return {n: v for n, v in parts.items() if v.nunique() > 1} or {year: parts[year]}

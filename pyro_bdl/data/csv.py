"""CSV files as columns of numbers and text, with errors that name column and row."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

_MAX_LISTED = 5
_MIN_TEXTS = 10  # up to this many different texts are always turned into indicators
_DATE = r"\d{4}-\d{1,2}-\d{1,2}.*"


def read_csv(path: Path, separator: str = ",") -> pd.DataFrame:
    """Read all columns as text, missing entries as NaN.

    :param separator: the character between columns.
    :raises FileNotFoundError: if there is no such file.
    :raises IsADirectoryError: for a folder.
    :raises ValueError: for a file that is not a table with a header and rows, or has an empty
        column.
    """
    if path.is_dir():
        raise IsADirectoryError(f"data: {path} is a folder; name a CSV file in it")
    if not path.is_file():
        raise FileNotFoundError(f"data: there is no file {path}")
    if len(separator) != 1:
        raise ValueError(f"separator={separator!r} (--separator) must be one character")
    table_options = {"header": None, "dtype": str, "sep": separator, "skipinitialspace": True}
    try:
        # The header is read as a row: pandas would silently rename repeated columns.
        header = pd.read_csv(path, nrows=1, encoding="utf-8-sig", **table_options).iloc[0]
        if len(header) == 1:
            raise ValueError(
                f"data: {path} has only the column {header[0]!r}, and a feature is needed too; if "
                f"another character than {separator!r} stands between columns, say "
                "separator= (--separator)"
            )
        table = pd.read_csv(path, encoding="utf-8-sig", **table_options)
    except pd.errors.EmptyDataError:
        raise ValueError(f"data: {path} is empty; give a header and rows") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data: {path} is not text in UTF-8 (byte {error.start}); convert it"
        ) from None
    except pd.errors.ParserError as error:
        reason = str(error).strip().removeprefix("Error tokenizing data. C error: ")
        raise ValueError(f"data: {path} cannot be read as a table: {reason}") from None
    for place, name in enumerate(header, start=1):
        if pd.isna(name):
            raise ValueError(
                f"data: column {place} of {path} has no name; name it, or remove it if it only "
                f"counts the rows"
            )
    names = [str(name).strip() for name in header]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(
            f"data: {path} has several columns named {quoted(repeated)}; rename or remove them"
        )
    if len(table) == 1:
        raise ValueError(f"data: {path} has a header but no rows")
    frame = table.iloc[1:].reset_index(drop=True)
    frame.columns = names
    empty = frame.columns[frame.isna().all()]
    if len(empty):
        raise ValueError(f"data: {path} has nothing in column {quoted(empty)}; remove or fill it")
    return frame


def to_numbers(column: pd.Series, decimal: str, thousands: str | None) -> pd.Series:
    """Text as numbers; NaN where it is missing or no number.

    :param decimal: the mark before decimals.
    :param thousands: the mark between groups of three digits; None if there is none.
    """
    text = column
    if thousands is not None:
        groups = rf"[+-]?\d{{1,3}}({re.escape(thousands)}\d{{3}})+({re.escape(decimal)}\d*)?"
        grouped = text.str.fullmatch(groups, na=False)
        text = text.mask(grouped, text.str.replace(thousands, "", regex=False))
    if decimal != ".":
        text = text.str.translate(str.maketrans({".": "?", decimal: "."}))
    return pd.to_numeric(text, errors="coerce").rename(column.name)


def read_features(
    frame: pd.DataFrame,
    path: Path,
    *,
    one_hot: bool,
    decimal: str,
    thousands: str | None,
    dates: Sequence[str],
) -> tuple[pd.DataFrame, list[str]]:
    """Columns of numbers, with ``one_hot`` also of text, and sentences on what was expanded.

    :param dates: columns that become year, month, day, weekday, hour and minute.
    :raises ValueError: for a mark of thousands that is also the decimal mark, and for columns that
        are no numbers or no dates.
    """
    if len(decimal) != 1 or thousands == decimal:
        raise ValueError(
            f"decimal={decimal!r} (--decimal) must be one character and another one than "
            f"thousands={thousands!r} (--thousands)"
        )
    missing = sorted(set(dates) - set(frame.columns))
    if missing:
        raise ValueError(f"dates: {path} has no feature {quoted(missing, 'or')} (--dates)")
    columns: list[pd.Series | pd.DataFrame] = []
    texts, notes = [], []
    for name, column in frame.items():
        if name in dates:
            parts = _date_parts(column, path)
            columns.append(parts)
            notes.append(f"{name} is expanded into {listed(list(parts.columns))}.")
            continue
        numbers = to_numbers(column, decimal, thousands)
        is_text = numbers.isna() & column.notna()
        if not is_text.any():
            columns.append(numbers)
            if (numbers.diff()[1:] == 1).all():
                notes.append(f"{name} counts the rows; remove it if it is no more than that.")
        elif one_hot:
            columns.append(_checked_text(column))
        else:
            row = int(np.flatnonzero(is_text)[0])
            texts.append(f"{name!r} ({column[row]!r} in row {row + 1})")
    if texts:
        raise ValueError(
            f"data: {path} has columns that are not numeric: {listed(texts)}; remove them, leave "
            "cells without a value empty, say how numbers are written with decimal= and thousands= "
            "(--decimal, --thousands), name columns of dates with dates= (--dates), or turn texts "
            "into columns of zeros and ones with one_hot=True (--one-hot)"
        )
    return pd.concat(columns, axis=1), notes


def _date_parts(column: pd.Series, path: Path) -> pd.DataFrame:
    """The parts of dates that differ between rows, as numbers; the year if none does."""
    known = column.notna()
    dates = pd.to_datetime(
        column.where(column.str.fullmatch(_DATE, na=False)),
        format="ISO8601",
        errors="coerce",
        utc=True,
    )
    bad = known & dates.isna()
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"dates: column {column.name!r} of {path} has {column[row]!r} in row {row + 1}; write "
            "dates as 2024-12-31 or 2024-12-31 23:59"
        )
    parts = {
        f"{column.name}.{part}": getattr(dates.dt, part).astype(float)
        for part in ("year", "month", "day", "day_of_week", "hour", "minute")
    }
    differing = {key: values for key, values in parts.items() if values.nunique() > 1}
    year = f"{column.name}.year"
    return pd.DataFrame(differing or {year: parts[year]})


def _checked_text(column: pd.Series) -> pd.Series:
    """A column of text with few enough values for indicators."""
    count = column.nunique()
    if count > max(_MIN_TEXTS, len(column) // 2):
        raise ValueError(
            f"data: column {column.name!r} has {count} different texts in {len(column)} rows, too "
            f"many for columns of zeros and ones; remove it"
        )
    return column.astype(object)


def target_values(
    column: pd.Series, task: str | None, decimal: str, thousands: str | None
) -> np.ndarray:
    """The target as numbers if it is numeric, else as text with None for missing entries."""
    numbers = to_numbers(column, decimal, thousands)
    is_text = (numbers.isna() & column.notna()).to_numpy()
    mostly_numbers = is_text.sum() < numbers.notna().sum()
    wants_numbers = task in ("regression", "count") or (task is None and mostly_numbers)
    if is_text.any() and wants_numbers:
        row = int(np.flatnonzero(is_text)[0])
        raise ValueError(
            f"target: column {column.name!r} is not numeric ({column[row]!r} in row {row + 1}); "
            f"correct it, or say task='classification' (--task classification)"
        )
    if not is_text.any():
        return numbers.to_numpy(dtype=float)
    return column.astype(object).where(column.notna(), None).to_numpy()


# ------------------------------------------------------------------------------ text of messages


def plain(value: object) -> str:
    """The name of a class; numbers without a trailing .0."""
    return f"{value:g}" if isinstance(value, (int, float, np.number)) else str(value)


def quoted(names: Iterable[object], word: str = "and") -> str:
    """Names in quotes; all of them if ``word`` is "or"."""
    parts = [repr(str(name)) for name in names]
    if word == "or" and len(parts) > 1:
        return f"{', '.join(parts[:-1])} or {parts[-1]}"
    return listed(parts)


def listed(items: Sequence[str], separator: str = ", ") -> str:
    """The first few items, and the number of further ones."""
    shown = separator.join(items[:_MAX_LISTED])
    rest = len(items) - _MAX_LISTED
    return shown if rest <= 0 else f"{shown} and {rest} more"

"""CSV files as columns of numbers, with errors that name column and row.

Files are read with pandas, which ArviZ requires anyway. Unlike the csv module it handles quoting,
markers of missing values and encodings.
"""

import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

_MAX_LISTED = 5
_MIN_TEXTS = 10  # up to this many different texts are always turned into indicators
_WITH_COMMAS = r"[+-]?\d*(,\d+)*([eE][+-]?\d+)?"
_DAY_BEFORE_YEAR = r"\s*\d{1,2}[./-]\d{1,2}[./-]\d"
_THOUSANDS = r"[+-]?[1-9]\d{0,2}(,\d{3})+"


def read_csv(path: Path) -> pd.DataFrame:
    """Read all columns as text, missing entries as NaN, numbers with a decimal point.

    :raises FileNotFoundError: if there is no such file.
    :raises IsADirectoryError: for a folder.
    :raises ValueError: for a file that is not a table with a header and rows, or has an empty
        column.
    """
    if path.is_dir():
        raise IsADirectoryError(f"data: {path} is a folder; name a CSV file in it")
    if not path.is_file():
        raise FileNotFoundError(f"data: there is no file {path}")
    try:
        with path.open(encoding="utf-8-sig") as file:
            header = file.readline()
            unquoted = re.sub(r'"[^"]*"', "", header)
            separator = max(",;\t|", key=unquoted.count)
            sign = '"' if separator == "," else ","  # the quote of entries with a comma
            commas = any(sign in line for line in file)
        if not header.strip():
            raise ValueError(f"data: {path} is empty or begins with an empty line; give a header")
        # Read the header as a row: pandas would silently rename repeated columns.
        table = pd.read_csv(
            path,
            header=None,
            dtype=str,
            sep=separator,
            skipinitialspace=True,
            encoding="utf-8-sig",
        )
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data: {path} is not text in UTF-8 (byte {error.start}); convert it"
        ) from None
    except pd.errors.ParserError as error:
        reason = str(error).strip().removeprefix("Error tokenizing data. C error: ")
        raise ValueError(f"data: {path} cannot be read as a table: {reason}") from None
    for place, name in enumerate(table.iloc[0], start=1):
        if pd.isna(name):
            raise ValueError(
                f"data: column {place} of {path} has no name; name it, or remove it if it only "
                f"counts the rows"
            )
    names = [str(name).strip() for name in table.iloc[0]]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(
            f"data: {path} has several columns named {quoted(repeated)}; rename or remove them"
        )
    if len(table) == 1:
        raise ValueError(f"data: {path} has a header but no rows")
    if len(names) == 1:
        raise ValueError(f"data: {path} has only the column {names[0]!r}; a feature is needed too")
    frame = table.iloc[1:].reset_index(drop=True)
    frame.columns = names
    empty = frame.columns[frame.isna().all()]
    if len(empty):
        raise ValueError(f"data: {path} has nothing in column {quoted(empty)}; remove or fill it")
    return _with_decimal_points(frame, path) if commas else frame


def _with_decimal_points(frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    """The table with decimal commas replaced by points.

    :raises ValueError: if commas might separate thousands, since no number such as 3,14 rules that
        out.
    """
    numbers = {}
    for name, column in frame.items():
        given = column.dropna()
        has_comma = given.str.contains(",", regex=False)
        if has_comma.any() and given.str.fullmatch(_WITH_COMMAS).all():
            numbers[name] = given[has_comma]
    thousands = {name: column.str.fullmatch(_THOUSANDS) for name, column in numbers.items()}
    known = not all(flags.all() for flags in thousands.values())
    for name, column in numbers.items():
        unclear = column if not known else column[column.str.count(",") > 1]
        if len(unclear):
            raise ValueError(
                f"data: {path} has numbers with commas that may separate thousands, in column "
                f"{name!r} ({unclear.iloc[0]!r} in row {unclear.index[0] + 1}); write numbers with "
                "a decimal point and nothing between thousands"
            )
    for name in numbers:
        frame[name] = frame[name].str.replace(",", ".", regex=False)
    return frame


def numeric_features(
    frame: pd.DataFrame, path: Path, one_hot: bool
) -> tuple[pd.DataFrame, list[str]]:
    """The columns as numbers, and sentences on what was expanded.

    Columns of dates become their parts; with ``one_hot`` columns of text become indicators of their
    values.
    """
    columns: list[pd.Series | pd.DataFrame] = []
    texts, notes = [], []
    for name, column in frame.items():
        numbers = pd.to_numeric(column, errors="coerce").rename(name)
        is_text = numbers.isna() & column.notna()
        if not is_text.any():
            columns.append(numbers)
        elif (dates := _dates(column)) is not None:
            parts = _date_parts(dates, name)
            columns.append(parts)
            notes.append(f"{name} holds dates, expanded into {listed(list(parts.columns))}.")
        elif one_hot:
            columns.append(_indicators(column, name))
        else:
            row = int(np.flatnonzero(is_text)[0])
            texts.append(f"{name!r} ({column[row]!r} in row {row + 1})")
    if texts:
        raise ValueError(
            f"data: {path} has columns that are not numeric: {listed(texts)}; remove them, or "
            f"turn them into columns of zeros and ones with one_hot=True (--one-hot)"
        )
    return pd.concat(columns, axis=1), notes


def _dates(column: pd.Series) -> pd.Series | None:
    """The column as dates if each entry is one, else None.

    :raises ValueError: for dates such as 1/2/2024 that no 13 among them tells day from month.
    """
    known = column.notna()
    found = []
    # An order of day and month is a question only where both stand before the year.
    day_before_year = column[known].str.match(_DAY_BEFORE_YEAR).any()
    for day_first in (False, True) if day_before_year else (False,):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # no single format: parsed one by one
            try:
                dates = pd.to_datetime(column, errors="coerce", dayfirst=day_first)
            except (ValueError, TypeError):  # such as several time zones
                return None
        if pd.api.types.is_datetime64_any_dtype(dates) and dates[known].notna().all():
            found.append(dates)
    if len(found) == 2 and not found[0].equals(found[1]):
        raise ValueError(
            f"data: column {column.name!r} has dates whose day and month cannot be told apart "
            f"({column[known].iloc[0]!r}); write them as 2024-12-31"
        )
    return found[0] if found else None


def _date_parts(dates: pd.Series, name: str) -> pd.DataFrame:
    """The parts of dates that differ between rows, as numbers; the year if none does."""
    parts = {
        f"{name}.{part}": getattr(dates.dt, part).astype(float)
        for part in ("year", "month", "day", "day_of_week", "hour", "minute")
    }
    differing = {key: values for key, values in parts.items() if values.nunique() > 1}
    return pd.DataFrame(differing or {f"{name}.year": parts[f"{name}.year"]})


def _indicators(column: pd.Series, name: str) -> pd.DataFrame:
    """A column of zeros and ones for each text, NaN if the text is missing."""
    found = column.nunique()
    if found > max(_MIN_TEXTS, len(column) // 2):
        raise ValueError(
            f"data: column {name!r} has {found} different texts in {len(column)} rows, too "
            f"many for columns of zeros and ones; remove it"
        )
    ones = pd.get_dummies(column, prefix=name, prefix_sep="=", dtype=float)
    return ones.mask(column.isna(), axis=0)


def target_values(column: pd.Series, name: str, task: str | None) -> np.ndarray:
    """The target as numbers if it is numeric, else as text with None for missing entries."""
    numbers = pd.to_numeric(column, errors="coerce")
    is_text = (numbers.isna() & column.notna()).to_numpy()
    mostly_numbers = is_text.sum() < numbers.notna().sum()
    wants_numbers = task in ("regression", "count") or (task is None and mostly_numbers)
    if is_text.any() and wants_numbers:
        row = int(np.flatnonzero(is_text)[0])
        raise ValueError(
            f"target: column {name!r} is not numeric ({column[row]!r} in row {row + 1}); correct "
            f"it, or say task='classification' (--task classification)"
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

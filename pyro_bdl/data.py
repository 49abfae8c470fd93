"""Data sets for the command and the tutorials: read, checked, split and standardised.

CSV files are read with pandas, which ArviZ brings along: it knows quoting, missing-value markers
and encodings that the csv module leaves to its caller.
"""

import difflib
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pyro_bdl.errors import BdlWarning

_MAX_LISTED = 5
_MAX_INTEGER_CLASSES = 10
_MIN_ROWS = 10


@dataclass(frozen=True)
class Dataset:
    """A supervised task, split and standardised.

    :param x_train: ``(N, D)``, standardised with its mean and sd.
    :param y_train: ``(N,)``. Regression: standardised, see :meth:`in_units`. Classification: int64
        indices into ``class_names``.
    :param x_test: ``(N, D)``, standardised with the mean and sd of the training part.
    :param y_test: ``(N,)``, as ``y_train``.
    :param feature_names: names of the D columns.
    :param target_name: name of the target.
    :param task: ``"regression"`` or ``"classification"``.
    :param class_names: names of the classes, empty for regression.
    :param y_mean: what was taken from the regression target, in its units.
    :param y_sd: what it was then divided by, in its units.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    feature_names: tuple[str, ...]
    target_name: str
    task: str
    class_names: tuple[str, ...] = ()
    y_mean: float = 0.0
    y_sd: float = 1.0

    def in_units(self, y: Tensor) -> Tensor:
        """Standardised targets or predictions in the units of the target, y * sd + mean."""
        return y * self.y_sd + self.y_mean

    def to(self, device: torch.device | str) -> "Dataset":
        """The same data set on another device."""
        moved = {
            name: getattr(self, name).to(device)
            for name in ("x_train", "y_train", "x_test", "y_test")
        }
        return replace(self, **moved)


# ------------------------------------------------------------------------------------- sources


def load_csv(
    path: str | Path,
    target: str,
    task: str | None = None,
    *,
    one_hot: bool = False,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Read a CSV file with a header; every column but the target is a feature.

    :param path: the file. The separator (comma, semicolon, tab or bar) is found from the header.
    :param target: name of the target column.
    :param task: ``"regression"`` or ``"classification"``; found from the target if None: text, or
        whole numbers with at most 10 distinct values, are classes.
    :param one_hot: turn each column of text into one column of zeros and ones for each of its
        values, named ``column=value``.
    :param test_fraction: see :func:`prepare`.
    :param seed: see :func:`prepare`.
    :raises FileNotFoundError: where there is no such file.
    :raises ValueError: where the file is empty, has only a header, ragged rows, unnamed or repeated
        columns; the target is not among them; a feature is not numeric; and all that
        :func:`prepare` refuses.
    """
    frame = _read_csv(Path(path))
    if target not in frame.columns:
        near = difflib.get_close_matches(target, frame.columns, n=3, cutoff=0.5)
        hint = f"did you mean {_names(near, 'or')}?" if near else f"it has {_names(frame.columns)}"
        raise ValueError(f"target: {path} has no column {target!r}; {hint}")
    features = _numeric_features(frame.drop(columns=target), Path(path), one_hot)
    return prepare(
        features.to_numpy(dtype=float),
        _target_values(frame[target], target, task),
        feature_names=tuple(features.columns),
        target_name=target,
        task=task,
        test_fraction=test_fraction,
        seed=seed,
    )


def load_default(*, test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """scikit-learn's diabetes data: 442 patients, 10 features, disease progression after a year.

    Source: Efron, Hastie, Johnstone, Tibshirani (2004), Least angle regression.
    """
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes(scaled=False)
    return prepare(
        bunch.data,
        bunch.target,
        feature_names=tuple(bunch.feature_names),
        target_name="disease progression",
        test_fraction=test_fraction,
        seed=seed,
    )


def two_clusters(n: int = 100, seed: int = 0, *, noise: float = 0.1) -> Dataset:
    """One feature in two clusters with a gap between them, y = cos(4 x + 0.8) + noise.

    Half of the inputs are uniform on [-1, -0.7], half on [0.5, 1]. The test inputs are 200 evenly
    spaced points on [-1.5, 1.5]. Nothing is standardised.

    :param n: number of training points, at least 2.
    :param seed: of the inputs and the noise.
    :param noise: sd of the noise on the training and the test targets.
    :raises ValueError: where ``n`` is smaller than 2 or ``noise`` is negative.

    Source: Foong et al. (2019), "In-between" uncertainty in Bayesian neural networks, section 4.
    """
    if n < 2:
        raise ValueError(f"n={n}: two clusters need at least 2 points")
    if noise < 0:
        raise ValueError(f"noise={noise}: a standard deviation is not negative")
    generator = torch.Generator().manual_seed(seed)
    left = -1 + 0.3 * torch.rand(n // 2, 1, generator=generator, device="cpu")
    right = 0.5 + 0.5 * torch.rand(n - n // 2, 1, generator=generator, device="cpu")
    x_train = torch.cat([left, right])
    x_test = torch.linspace(-1.5, 1.5, 200, device="cpu")[:, None]
    y_train, y_test = (
        torch.cos(4 * x + 0.8).squeeze(-1)
        + noise * torch.randn(len(x), generator=generator, device="cpu")
        for x in (x_train, x_test)
    )
    return Dataset(x_train, y_train, x_test, y_test, ("x",), "y", "regression")


# --------------------------------------------------------------------- from numbers to a Dataset


def prepare(
    x: np.ndarray,
    y: np.ndarray,
    *,
    feature_names: Sequence[str],
    target_name: str = "y",
    task: str | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Check, split and standardise; tensors have torch's default dtype and are on the CPU.

    The split of classes is stratified: each class has its share in both parts, and at least one
    row in the training part. Columns that are constant in the training part become zeros, with a
    warning that names them.

    :param x: ``(N, D)``, numbers.
    :param y: ``(N,)``, numbers or, for classes, text.
    :param feature_names: D names, used in messages.
    :param target_name: name of the target, used in messages.
    :param task: ``"regression"``, ``"classification"``, or None to find it from ``y``.
    :param test_fraction: share of the rows in the test part, between 0 and 1.
    :param seed: of the split.
    :raises ValueError: for shapes that do not fit; fewer than 10 rows; NaN or infinity (rows and
        columns are named); a constant target, or one that the dtype cannot resolve; fewer than two
        classes; too few rows of each class to have any in the test part; an unknown task or a test
        fraction outside (0, 1).
    """
    x, y = np.asarray(x, dtype=float), np.asarray(y)
    _check_arguments(x, y, feature_names, task, test_fraction)
    _check_finite(x, y, feature_names, target_name)
    task = task or _find_task(y)
    rng = np.random.default_rng(seed)
    if task == "classification":
        class_values, labels = np.unique(y, return_inverse=True)
        _check_classes(class_values, y, target_name)
        test = _stratified_test_rows(labels, test_fraction, rng, target_name)
        y, y_mean, y_sd = labels, 0.0, 1.0
        class_names = tuple(_plain(value) for value in class_values)
    else:
        test = np.zeros(len(y), dtype=bool)
        test[rng.permutation(len(y))[: max(1, round(test_fraction * len(y)))]] = True
        y = y.astype(float)
        with np.errstate(over="ignore"):
            y_mean, y_sd = float(y[~test].mean()), float(y[~test].std())
        if np.ptp(y[~test]) == 0:
            raise ValueError(
                f"target: column {target_name!r} is constant ({y[~test][0]:g} in all training "
                f"rows): there is nothing to learn; choose another target"
            )
        _check_resolution(y_mean, y_sd, target_name)
        y, class_names = (y - y_mean) / y_sd, ()
    x = _standardise(x, ~test, feature_names)

    dtype = torch.get_default_dtype()
    y_dtype = torch.int64 if task == "classification" else dtype
    return Dataset(
        x_train=torch.as_tensor(x[~test], dtype=dtype, device="cpu"),
        y_train=torch.as_tensor(y[~test], dtype=y_dtype, device="cpu"),
        x_test=torch.as_tensor(x[test], dtype=dtype, device="cpu"),
        y_test=torch.as_tensor(y[test], dtype=y_dtype, device="cpu"),
        feature_names=tuple(feature_names),
        target_name=target_name,
        task=task,
        class_names=class_names,
        y_mean=y_mean,
        y_sd=y_sd,
    )


def _find_task(y: np.ndarray) -> str:
    if y.dtype.kind not in "iuf":
        return "classification"
    whole = np.all(y == np.round(y))
    few = len(np.unique(y)) <= _MAX_INTEGER_CLASSES
    # A constant is a broken regression target rather than a single class.
    return "classification" if whole and few and np.ptp(y) > 0 else "regression"


def _stratified_test_rows(
    labels: np.ndarray, fraction: float, rng: np.random.Generator, target_name: str
) -> np.ndarray:
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        test[rows[: min(round(fraction * len(rows)), len(rows) - 1)]] = True
    if not test.any():
        raise ValueError(
            f"target: the classes of column {target_name!r} have too few rows for a test part of "
            f"{fraction:g}; give more rows, or a larger test_fraction"
        )
    return test


def _standardise(x: np.ndarray, train: np.ndarray, names: Sequence[str]) -> np.ndarray:
    constant = np.ptp(x[train], axis=0) == 0
    if constant.any():
        columns = [name for name, flag in zip(names, constant, strict=True) if flag]
        warnings.warn(
            f"constant in the training part, so set to zero: {_names(columns)}",
            BdlWarning,
            stacklevel=4,
        )
    sd = np.where(constant, 1.0, x[train].std(axis=0))
    return np.where(constant, 0.0, (x - x[train].mean(axis=0)) / sd)


# ----------------------------------------------------------------------------------- reading CSV


def _read_csv(path: Path) -> pd.DataFrame:
    """All columns as text, missing entries as NaN."""
    if not path.is_file():
        raise FileNotFoundError(f"data: there is no file {path}")
    try:
        with path.open(encoding="utf-8-sig") as file:
            header = file.readline()
        if not header.strip():
            raise ValueError(f"data: {path} is empty or begins with an empty line; give a header")
        unquoted = re.sub(r'"[^"]*"', "", header)
        separator = max(",;\t|", key=unquoted.count)
        # Read the header as a row: pandas would rename repeated columns without a word.
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
            f"data: {path} is no text in UTF-8 (byte {error.start}); convert it"
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
            f"data: {path} has several columns named {_names(repeated)}; rename or remove them"
        )
    if len(table) == 1:
        raise ValueError(f"data: {path} has a header but no rows")
    if len(names) == 1:
        raise ValueError(f"data: {path} has only the column {names[0]!r}; a feature is needed too")
    frame = table.iloc[1:].reset_index(drop=True)
    frame.columns = names
    return frame


def _numeric_features(frame: pd.DataFrame, path: Path, one_hot: bool) -> pd.DataFrame:
    columns, texts = [], []
    for name, column in frame.items():
        numbers = pd.to_numeric(column, errors="coerce").rename(name)
        is_text = numbers.isna() & column.notna()
        if not is_text.any():
            columns.append(numbers)
        elif one_hot:
            columns.extend(_indicators(column, name))
        else:
            row = int(np.flatnonzero(is_text)[0])
            texts.append(f"{name!r} ({column[row]!r} in row {row + 1})")
    if texts:
        raise ValueError(
            f"data: {path} has columns that are not numeric: {_listed(texts)}; remove them, or "
            f"turn them into columns of zeros and ones with one_hot=True (--one-hot)"
        )
    return pd.concat(columns, axis=1)


def _indicators(column: pd.Series, name: str) -> list[pd.Series]:
    values = sorted(column.dropna().unique())
    if len(values) > max(_MIN_ROWS, len(column) // 2):
        raise ValueError(
            f"data: column {name!r} has {len(values)} different texts in {len(column)} rows, too "
            f"many for columns of zeros and ones; remove it"
        )
    missing = column.isna()
    return [
        (column == value).astype(float).mask(missing).rename(f"{name}={value}") for value in values
    ]


def _target_values(column: pd.Series, name: str, task: str | None) -> np.ndarray:
    """The target as numbers where it is one, else as text with None for what is missing."""
    numbers = pd.to_numeric(column, errors="coerce")
    is_text = (numbers.isna() & column.notna()).to_numpy()
    mostly_numbers = is_text.sum() < numbers.notna().sum()
    if is_text.any() and (task == "regression" or (task is None and mostly_numbers)):
        row = int(np.flatnonzero(is_text)[0])
        raise ValueError(
            f"target: column {name!r} is not numeric ({column[row]!r} in row {row + 1}); correct "
            f"it, or say task='classification' (--task classification)"
        )
    if not is_text.any():
        return numbers.to_numpy(dtype=float)
    return column.astype(object).where(column.notna(), None).to_numpy()


# ---------------------------------------------------------------------------------------- checks


def _check_arguments(
    x: np.ndarray, y: np.ndarray, names: Sequence[str], task: str | None, test_fraction: float
) -> None:
    if task not in (None, "regression", "classification"):
        raise ValueError(f"task={task!r} is unknown; choose 'regression' or 'classification'")
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction={test_fraction} must lie between 0 and 1")
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise ValueError(
            f"x and y must have shapes (N, D) and (N,), but have {x.shape} and {y.shape}"
        )
    if len(names) != x.shape[1]:
        raise ValueError(f"feature_names has {len(names)} names for {x.shape[1]} columns of x")
    if len(y) < _MIN_ROWS:
        raise ValueError(f"data: {len(y)} rows are too few; at least {_MIN_ROWS} are needed")


def _check_finite(
    x: np.ndarray, y: np.ndarray, feature_names: Sequence[str], target_name: str
) -> None:
    bad_y = ~np.isfinite(y) if y.dtype.kind == "f" else np.array([value is None for value in y])
    bad = np.column_stack([~np.isfinite(x), bad_y])
    if not bad.any():
        return
    names = [*feature_names, target_name]
    places = [
        f"row {row + 1}: {_names(names[i] for i in np.flatnonzero(bad[row]))}"
        for row in np.flatnonzero(bad.any(axis=1))
    ]
    raise ValueError(
        f"data: missing, NaN or infinite values in {_listed(places, separator='; ')}; fill them "
        f"in or remove the rows or columns"
    )


def _check_resolution(mean: float, sd: float, target_name: str) -> None:
    """In their units, targets and predictions are y * sd + mean in torch's default dtype."""
    dtype = torch.get_default_dtype()
    if not torch.finfo(dtype).eps * abs(mean) < 0.01 * sd < np.inf:
        raise ValueError(
            f"target: column {target_name!r} has mean {mean:g} and sd {sd:g}, which {dtype} cannot "
            "resolve: subtract a constant from it, or give it in other units"
        )


def _check_classes(class_values: np.ndarray, y: np.ndarray, target_name: str) -> None:
    if len(class_values) < 2:
        raise ValueError(
            f"target: column {target_name!r} has the single class {_plain(class_values[0])!r}; at "
            f"least two are needed"
        )
    if len(class_values) > len(y) // 2:
        if y.dtype.kind in "iuf":
            remedy = "say task='regression' (--task regression)"
        else:
            remedy = f"where it is a quantity or a date ({y[0]!r} in row 1), make it numbers,"
        raise ValueError(
            f"target: column {target_name!r} has {len(class_values)} different values in "
            f"{len(y)} rows, too many for classes; {remedy} or choose another target"
        )


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float, np.number)) else str(value)


def _names(names: Iterable[object], word: str = "and") -> str:
    quoted = [repr(str(name)) for name in names]
    if word == "or" and len(quoted) > 1:
        return f"{', '.join(quoted[:-1])} or {quoted[-1]}"
    return _listed(quoted)


def _listed(items: Sequence[str], separator: str = ", ") -> str:
    shown = separator.join(items[:_MAX_LISTED])
    rest = len(items) - _MAX_LISTED
    return shown if rest <= 0 else f"{shown} and {rest} more"

"""Data sets for the command and the tutorials: read, checked, split and standardized."""

import difflib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pyro_bdl.data.csv import listed, plain, quoted, read_csv, read_features, target_values
from pyro_bdl.errors import BdlWarning

TASKS = ("regression", "classification", "count")
IMPUTERS = ("mean", "median", "most_frequent")
_MAX_INTEGER_CLASSES = 10
_MIN_ROWS, _MIN_TRAINING_ROWS = 10, 5


@dataclass(frozen=True)
class Dataset:
    """A supervised task, split and standardized.

    :param x_train: ``(N, D)``, standardized with its mean and sd.
    :param y_train: ``(N,)``. Regression: standardized, see :meth:`in_units`. Classification: int64
        indices into ``class_names``.
    :param x_test: ``(N, D)``, standardized with the mean and sd of the training part.
    :param y_test: ``(N,)``, as ``y_train``.
    :param feature_names: names of the D columns.
    :param target_name: name of the target.
    :param task: ``"regression"``, ``"classification"`` or ``"count"``.
    :param class_names: names of the classes, empty for regression.
    :param y_mean: the mean subtracted from the regression target, in its units.
    :param y_sd: the sd that it was then divided by, in its units.
    :param x_mean: D means that were subtracted from the features, in their units; empty if nothing
        was.
    :param x_sd: D sds that they were then divided by.
    :param test_rows: the rows of the source that the test part holds, counted from 1, without the
        header; empty if they have no numbers.
    :param source: where the data come from, in words.
    :param split: how they were split, in words.
    :param notes: sentences on what was inferred, expanded and filled in.
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
    x_mean: tuple[float, ...] = ()
    x_sd: tuple[float, ...] = ()
    test_rows: tuple[int, ...] = ()
    source: str = ""
    split: str = ""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return (
            f"<Dataset of {self.target_name!r}: {self.task}, {len(self.feature_names)} features, "
            f"{len(self.x_train)} training and {len(self.x_test)} test rows>"
        )

    def point(self, place: int) -> dict[str, Any]:
        """A test point in the units of the source: its row, its features and its target.

        :param place: its place in the test part.
        """
        values = self.x_test[place].double().cpu()
        if self.x_mean:
            sd, mean = values.new_tensor(self.x_sd), values.new_tensor(self.x_mean)
            values = values * sd + mean
        y = self.y_test[place]
        target: Any = self.class_names[int(y)] if self.class_names else float(self.in_units(y))
        return {
            "row": self.test_rows[place] if self.test_rows else None,
            "inputs": dict(zip(self.feature_names, values.tolist(), strict=True)),
            "target": target,
        }

    def in_units(self, y: Tensor) -> Tensor:
        """Standardized targets or predictions in the units of the target, y * sd + mean."""
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
    separator: str = ",",
    decimal: str = ".",
    thousands: str | None = None,
    dates: Sequence[str] = (),
    one_hot: bool = False,
    impute: str | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    fold: tuple[int, int] | None = None,
) -> Dataset:
    """Read a CSV file with a header; every column but the target is a feature.

    How numbers and dates are written is not guessed: it is said here.

    :param path: the file.
    :param target: name of the target column.
    :param separator: the character between columns.
    :param decimal: the mark before decimals.
    :param thousands: the mark between groups of three digits; None: there is none.
    :param dates: columns of dates such as 2024-12-31 or 2024-12-31 23:59. They become year, month,
        day, weekday, hour and minute, as far as these differ between rows.
    :param task: ``"regression"``, ``"classification"`` or ``"count"``; found from the target if
        None: text, or whole numbers with at most 10 distinct values, are classes. The data set's
        ``notes`` say what was found.
    :param one_hot: turn each column of text into one column of zeros and ones for each of its
        values in the training part, named ``column=value``.
    :param impute: see :func:`prepare`.
    :param test_fraction: see :func:`prepare`.
    :param seed: see :func:`prepare`.
    :param fold: see :func:`prepare`.
    :raises FileNotFoundError: if there is no such file.
    :raises ValueError: if the file is empty, or has only a header, ragged rows, or unnamed or
        repeated columns; if the target is not among the columns; if a feature is not numeric or a
        date is not written as above; and in the cases of :func:`prepare`.
    """
    frame = read_csv(Path(path), separator)
    if target not in frame.columns:
        near = difflib.get_close_matches(target, frame.columns, n=3, cutoff=0.5)
        hint = f"did you mean {quoted(near, 'or')}?" if near else f"it has {quoted(frame.columns)}"
        raise ValueError(f"target: {path} has no column {target!r}; {hint}")
    features, notes = read_features(
        frame.drop(columns=target),
        Path(path),
        one_hot=one_hot,
        decimal=decimal,
        thousands=thousands,
        dates=dates,
    )
    made = prepare(
        features,
        target_values(frame[target], task, decimal, thousands),
        feature_names=tuple(features.columns),
        target_name=target,
        task=task,
        impute=impute,
        test_fraction=test_fraction,
        seed=seed,
        fold=fold,
    )
    return replace(made, source=f"the file {path}", notes=(*notes, *made.notes))


def load_default(
    *, test_fraction: float = 0.2, seed: int = 0, fold: tuple[int, int] | None = None
) -> Dataset:
    """scikit-learn's diabetes data: 442 patients, 10 features, disease progression after a year.

    Source: Efron, Hastie, Johnstone, Tibshirani (2004), Least angle regression.
    """
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes(scaled=False)
    made = prepare(
        bunch.data,
        bunch.target,
        feature_names=tuple(bunch.feature_names),
        target_name="disease progression",
        task="regression",
        test_fraction=test_fraction,
        seed=seed,
        fold=fold,
    )
    return replace(made, source="scikit-learn's diabetes data")


def two_clusters(n: int = 100, seed: int = 0, *, noise: float = 0.1) -> Dataset:
    """One feature in two clusters with a gap between them, y = cos(4 x + 0.8) + noise.

    Half of the inputs are uniform on [-1, -0.7], half on [0.5, 1]. The test inputs are 200 evenly
    spaced points on [-1.5, 1.5]. Nothing is standardized.

    :param n: number of training points, at least 2.
    :param seed: seed of the inputs and the noise.
    :param noise: sd of the noise on the training and the test targets.
    :raises ValueError: if ``n`` is smaller than 2 or ``noise`` is negative.

    Source: Foong et al. (2019), "In-between" uncertainty in Bayesian neural networks, section 4.
    """
    if n < 2:
        raise ValueError(f"n={n}: two clusters need at least 2 points")
    if noise < 0:
        raise ValueError(f"noise={noise}: a standard deviation must not be negative")
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
    return Dataset(
        x_train, y_train, x_test, y_test, ("x",), "y", "regression",
        source=f"two clusters with a gap between them, simulated with seed {seed}",
        split="the test inputs are a grid on [-1.5, 1.5]",
    )  # fmt: skip


# --------------------------------------------------------------------- from numbers to a Dataset


def prepare(
    x: np.ndarray | pd.DataFrame,
    y: np.ndarray,
    *,
    feature_names: Sequence[str],
    target_name: str = "y",
    task: str | None = None,
    impute: str | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    fold: tuple[int, int] | None = None,
) -> Dataset:
    """Check, split and standardize; tensors have torch's default dtype and are on the CPU.

    The split of classes is stratified: each class has its share in both parts, and at least one
    row in the training part. Columns that are constant in the training part, up to the rounding of
    their numbers, become zeros, with a warning that names them.

    :param x: ``(N, D)``, numbers; columns of text (dtype ``object``) of a table become indicators.
    :param y: ``(N,)``, numbers or, for classes, text.
    :param feature_names: D names, used in messages.
    :param target_name: name of the target, used in messages.
    :param task: ``"regression"``, ``"classification"``, ``"count"`` (whole numbers that are not
        standardized), or None to find it from ``y``.
    :param impute: what missing numbers (NaN) are filled in with, of the training part:
        ``"mean"``, ``"median"`` or ``"most_frequent"``; missing text is filled in with the most
        frequent one. None refuses them.
    :param test_fraction: share of the rows in the test part, between 0 and 1.
    :param seed: seed of the split.
    :param fold: ``(i, k)``: the test part is the i-th of k folds, 0 <= i < k, in place of a random
        share of the rows.
    :raises ValueError: for shapes that do not fit; fewer than 10 rows, or 5 in the training part;
        NaN, infinity, or numbers so large that squared errors overflow (the error names rows and
        columns); a constant target, or a target that the dtype cannot resolve; fewer than two
        classes; too few rows in each class for the test part; an unknown task; a test fraction
        outside (0, 1).
    """
    y, dtype = np.asarray(y), torch.get_default_dtype()
    _check_arguments(x, y, feature_names, task, impute, test_fraction)
    frame = x if isinstance(x, pd.DataFrame) else pd.DataFrame(np.asarray(x, dtype=float))
    _check_values(frame, y, feature_names, target_name, impute is not None)
    notes = []
    if task is None:
        task, note = _found_task(y, target_name)
        notes.append(note)
    y_mean, y_sd = 0.0, 1.0
    class_names: tuple[str, ...] = ()
    labels = None
    if task == "classification":
        class_values, labels = np.unique(y, return_inverse=True)
        _check_classes(class_values, y, target_name)
        y, class_names = labels, tuple(plain(value) for value in class_values)
    else:
        y = _numbers(y, target_name, task)
    if fold is None:
        test = _random_rows(len(y), labels, test_fraction, seed, target_name)
    else:
        test = _fold(labels, fold, seed, len(y))
    _check_split(test, test_fraction)
    if labels is None and np.ptp(y[~test]) == 0:
        raise ValueError(
            f"target: column {target_name!r} is constant ({y[~test][0]:g} in all training "
            f"rows): there is nothing to learn; choose another target"
        )
    if task == "regression":
        y_mean, y_sd = float(y[~test].mean()), float(y[~test].std())
        _check_resolution(y_mean, y_sd, target_name)
        y = (y - y_mean) / y_sd
    features, names, filled = _encoded(frame, ~test, impute, feature_names)
    features, x_mean, x_sd = _standardized(features, ~test, names)
    far = _too_large(np.column_stack([features, y]), torch.finfo(dtype).max)
    if far.any():
        raise ValueError(
            f"data: numbers too far from those of the training part to compute with, in "
            f"{_places(far, [*names, target_name])}; correct them or remove the rows"
        )

    share = (
        f"{test_fraction:.3g} of the rows" if fold is None else f"fold {fold[0] + 1} of {fold[1]}"
    )
    by_class = ", of each class alike" if task == "classification" else ""
    y_dtype = torch.int64 if task == "classification" else dtype
    return Dataset(
        x_train=torch.as_tensor(features[~test], dtype=dtype, device="cpu"),
        y_train=torch.as_tensor(y[~test], dtype=y_dtype, device="cpu"),
        x_test=torch.as_tensor(features[test], dtype=dtype, device="cpu"),
        y_test=torch.as_tensor(y[test], dtype=y_dtype, device="cpu"),
        feature_names=tuple(names),
        target_name=target_name,
        task=task,
        class_names=class_names,
        y_mean=y_mean,
        y_sd=y_sd,
        x_mean=tuple(x_mean.tolist()),
        x_sd=tuple(x_sd.tolist()),
        test_rows=tuple((np.flatnonzero(test) + 1).tolist()),
        split=f"at random, {share} for the test{by_class}; seed {seed}",
        notes=(*notes, *filled),
    )


def _found_task(y: np.ndarray, name: str) -> tuple[str, str]:
    """The task that the target suggests, and a sentence that says why and how to change it."""
    values = len(pd.unique(y))
    if y.dtype.kind not in "iuf":
        return "classification", f"{name} holds text, {values} different ones: a classification."
    whole = bool(np.all(y == np.round(y)))
    # A constant is more likely a broken regression target than a single class.
    if whole and values <= _MAX_INTEGER_CLASSES and np.ptp(y) > 0:
        return "classification", (
            f"{name} holds {values} different whole numbers, so that it is taken as "
            f"{values} classes; if they are quantities, say --task regression, if they count "
            "something, --task count."
        )
    note = f"{name} holds numbers, {values} different ones: a regression."
    if whole and y.min() >= 0:
        note = note[:-1] + "; if they count something, say --task count."
    return "regression", note


def _numbers(y: np.ndarray, name: str, task: str) -> np.ndarray:
    """The target as floats; counts are checked."""
    y = y.astype(float)
    if task == "count" and (bool(np.any(y < 0)) or bool(np.any(y != np.round(y)))):
        row = int(np.flatnonzero((y < 0) | (y != np.round(y)))[0])
        raise ValueError(
            f"target: column {name!r} does not hold counts ({y[row]:g} in row {row + 1}); say "
            "task='regression' (--task regression)"
        )
    return y


def _fold(labels: np.ndarray | None, fold: tuple[int, int], seed: int, rows: int) -> np.ndarray:
    """The rows of one of k folds; of classes each fold has its share."""
    from sklearn.model_selection import KFold, StratifiedKFold

    place, count = fold
    most = rows if labels is None else int(np.bincount(labels).max())
    if not 0 <= place < count or count < 2:
        raise ValueError(f"fold={fold}: give (i, k) with 0 <= i < k and k >= 2")
    if count > most:
        whose = "" if labels is None else " of the largest class"
        raise ValueError(
            f"{count} folds (--folds) are too many for {most} rows{whose}; choose at most {most}"
        )
    kind = KFold if labels is None else StratifiedKFold
    splits = kind(count, shuffle=True, random_state=seed)
    given = np.zeros(rows) if labels is None else labels
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class with fewer rows than folds
        chosen = [test for _, test in splits.split(np.zeros((rows, 1)), given)][place]
    test = np.zeros(rows, dtype=bool)
    test[chosen] = True
    return test


def _random_rows(
    count: int, labels: np.ndarray | None, fraction: float, seed: int, target_name: str
) -> np.ndarray:
    """The rows of a random test part; of classes their share, and never all rows of one."""
    rng = np.random.default_rng(seed)
    test = np.zeros(count, dtype=bool)
    if labels is None:
        test[rng.permutation(count)[: max(1, round(fraction * count))]] = True
        return test
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        test[rows[: min(round(fraction * len(rows)), len(rows) - 1)]] = True
    if not test.any():
        raise ValueError(
            f"target: the classes of column {target_name!r} have too few rows for a test part of "
            f"{fraction:g}; give more rows, or a larger test_fraction"
        )
    return test


def _encoded(
    frame: pd.DataFrame, train: np.ndarray, impute: str | None, names: Sequence[str]
) -> tuple[np.ndarray, list[str], list[str]]:
    """Numbers, then indicators of text, both as the training rows have them: values and names, and
    a sentence that counts what was filled in."""
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    is_text = _is_text(frame)
    texts, numbers = np.flatnonzero(is_text).tolist(), np.flatnonzero(~is_text).tolist()
    encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    filled = SimpleImputer(strategy=impute, keep_empty_features=True) if impute else "passthrough"
    transformer = ColumnTransformer(
        [
            ("numbers", filled, numbers),
            ("texts", make_pipeline(SimpleImputer(strategy="most_frequent"), encoder), texts),
        ]
    )
    frame = frame.set_axis(range(frame.shape[1]), axis=1)
    values = transformer.fit(frame[train]).transform(frame)
    shown = [names[i] for i in numbers]
    if len(texts):
        fitted = transformer.named_transformers_["texts"][-1].categories_
        shown += [
            f"{names[i]}={text}" for i, kinds in zip(texts, fitted, strict=True) for text in kinds
        ]
    missing = frame.isna().sum()
    if impute is None or not missing.any():
        return values, shown, []
    columns = [f"{name} {count}" for name, count in zip(names, missing, strict=True) if count]
    note = (
        f"{missing.sum()} missing values filled in with the {impute.replace('_', ' ')} of the "
        f"training rows ({listed(columns)})."
    )
    return values, shown, [note]


def _is_text(frame: pd.DataFrame) -> np.ndarray:
    return np.array([not pd.api.types.is_numeric_dtype(kind) for kind in frame.dtypes])


def _standardized(
    x: np.ndarray, train: np.ndarray, names: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The standardized features, their means and their sds in the training part."""
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(x[train])
    x = scaler.transform(x)
    constant = ~np.isclose(x[train].std(axis=0), 1.0)  # scikit-learn leaves them unscaled
    if constant.any():
        columns = [name for name, flag in zip(names, constant, strict=True) if flag]
        warnings.warn(
            f"constant in the training part, so set to zero: {quoted(columns)}",
            BdlWarning,
            stacklevel=4,
        )
    return np.where(constant, 0.0, x), scaler.mean_, scaler.scale_


# ---------------------------------------------------------------------------------------- checks


def _check_arguments(
    x: np.ndarray | pd.DataFrame,
    y: np.ndarray,
    names: Sequence[str],
    task: str | None,
    impute: str | None,
    test_fraction: float,
) -> None:
    if task not in (None, *TASKS):
        raise ValueError(f"task={task!r} is unknown; choose {quoted(TASKS, 'or')}")
    if impute not in (None, *IMPUTERS):
        raise ValueError(f"impute={impute!r} is unknown; choose {quoted(IMPUTERS, 'or')}")
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction={test_fraction} must lie between 0 and 1")
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise ValueError(
            f"x and y must have shapes (N, D) and (N,), but have {x.shape} and {y.shape}"
        )
    if len(names) != x.shape[1]:
        raise ValueError(f"feature_names has {len(names)} names for {x.shape[1]} columns of x")
    if len(y) < _MIN_ROWS:
        rows = f"{len(y)} row" + "s" * (len(y) != 1)
        raise ValueError(f"data: there are {rows}; at least {_MIN_ROWS} are needed")


def _check_values(
    frame: pd.DataFrame,
    y: np.ndarray,
    feature_names: Sequence[str],
    target_name: str,
    imputed: bool,
) -> None:
    """Check that no value is missing, and that squares of all numbers can be computed."""
    missing = frame.isna().to_numpy()
    numbers = np.where(_is_text(frame), 0.0, frame.mask(missing, 0.0)).astype(float)
    bad_x = _too_large(numbers, np.finfo(float).max)
    largest = torch.finfo(torch.get_default_dtype()).max  # targets are scored in their own units
    bad_y = pd.isna(y) | (y.dtype.kind == "f" and _too_large(y, largest))
    bad = np.column_stack([bad_x if imputed else bad_x | missing, bad_y])
    if bad.any():
        only_missing = not (bad_y.any() or bad_x.any())
        remedy = ", or have them filled in with impute='median' (--impute median)"
        raise ValueError(
            f"data: missing values, infinity or numbers too large in "
            f"{_places(bad, [*feature_names, target_name])}; fill them in, or remove the rows or "
            f"columns{remedy if only_missing else ''}"
        )


def _too_large(values: np.ndarray, largest: float) -> np.ndarray:
    """Where squares overflow, even of numbers a thousand times larger."""
    return abs(values) >= largest**0.5 / 1000


def _places(bad: np.ndarray, names: Sequence[str]) -> str:
    """Rows and columns in which ``bad`` is true."""
    places = [
        f"row {row + 1}: {quoted(names[i] for i in np.flatnonzero(bad[row]).tolist())}"
        for row in np.flatnonzero(bad.any(axis=1))
    ]
    return listed(places, separator="; ")


def _check_split(test: np.ndarray, test_fraction: float) -> None:
    left = int((~test).sum())
    if left < _MIN_TRAINING_ROWS:
        raise ValueError(
            f"test_fraction={test_fraction:g} (--test-fraction) leaves {left} of the {len(test)} "
            f"rows to learn from; at least {_MIN_TRAINING_ROWS} are needed: make it smaller"
        )


def _check_resolution(mean: float, sd: float, target_name: str) -> None:
    """Check that the default dtype can resolve the targets y * sd + mean."""
    dtype = torch.get_default_dtype()
    if not torch.finfo(dtype).eps * abs(mean) < 0.01 * sd < np.inf:
        raise ValueError(
            f"target: column {target_name!r} has mean {mean:g} and sd {sd:g}, which {dtype} cannot "
            "resolve: subtract a constant from it, or give it in other units"
        )


def _check_classes(class_values: np.ndarray, y: np.ndarray, target_name: str) -> None:
    if len(class_values) < 2:
        raise ValueError(
            f"target: column {target_name!r} has the single class {plain(class_values[0])!r}; at "
            f"least two are needed"
        )
    if len(class_values) > len(y) // 2:
        if y.dtype.kind in "iuf":
            remedy = "say task='regression' (--task regression)"
        else:
            remedy = f"if it is a quantity or a date ({y[0]!r} in row 1), make it numbers,"
        raise ValueError(
            f"target: column {target_name!r} has {len(class_values)} different values in "
            f"{len(y)} rows, too many for classes; {remedy} or choose another target"
        )

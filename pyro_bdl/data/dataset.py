"""``Dataset``: a supervised task, and ``prepare``, which checks, splits and standardizes it."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pyro_bdl.errors import warn
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.validation import one_of

Task = Literal["regression", "classification", "count", "share", "censored", "times"]
# The network's output in words, for tasks whose targets are on another scale.
LINKS = {"count": "log rate", "share": "logit of the mean", "times": "log location"}
CENSORED = ("censored", "times")
_KNOWN_AS = ("known to be larger (0)", "seen (1)", "known to be smaller (2)", "in an interval (3)")
Imputer = Literal["mean", "median", "most_frequent"]
_MAX_INTEGER_CLASSES = 10
_MIN_ROWS, _MIN_TRAINING_ROWS = 10, 5
_MAX_LISTED = 5


@dataclass(frozen=True)
class Dataset:
    """A supervised task, split and standardized.

    :param x_train: ``(N, D)``, standardized with its mean and sd.
    :param y_train: ``(N,)``. Regression: standardized, see :meth:`in_units`. Classification: int64
        indices into ``class_names``. Censored targets: ``(N, 2)`` or ``(N, 3)``, as those of
        ``models.CensoredRegression``.
    :param x_test: ``(N, D)``, standardized with the mean and sd of the training part.
    :param y_test: ``(N,)``, as ``y_train``.
    :param feature_names: names of the D columns.
    :param target_name: name of the target.
    :param task: ``"regression"``, ``"classification"``, ``"count"``, ``"share"``, ``"censored"`` or
        ``"times"``.
    :param class_names: names of the classes, empty for regression.
    :param y_mean: the mean subtracted from the regression target, in its units.
    :param y_sd: the sd that it was then divided by, in its units; of times their geometric mean.
    :param x_mean: D means that were subtracted from the features, in their units; empty if nothing
        was.
    :param x_sd: D sds that they were then divided by.
    :param test_rows: the rows of the source that the test part holds, counted from 1, without the
        header; empty if they have no numbers.
    :param source: where the data come from, in words.
    :param split: how they were split, in words.
    :param notes: sentences on what was inferred and filled in.
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
        values = double(self.x_test[place]).cpu()
        if self.x_mean:
            values = values * values.new_tensor(self.x_sd) + values.new_tensor(self.x_mean)
        y = self.y_test[place]
        return {
            "row": self.test_rows[place] if self.test_rows else None,
            "inputs": dict(zip(self.feature_names, values.tolist(), strict=True)),
            "target": self._in_words(y) if y.dim() else self._target(y),
        }

    def point_name(self, place: int) -> str:
        """A test point's row in the source, or its place in simulated data, and its target."""
        row, y = self.test_rows[place] if self.test_rows else None, self.y_test[place]
        where = f"point {place}" if row is None else f"row {row}"
        target = self._in_words(y, 3) if y.dim() else _plain(self._target(y), 3)
        return f"{where}, target {target}"

    def in_units(self, y: Tensor) -> Tensor:
        """Standardized targets or predictions in the units of the target, y * sd + mean."""
        return y * self.y_sd + self.y_mean

    def _target(self, y: Tensor) -> str | float:
        return self.class_names[int(y)] if self.class_names else float(self.in_units(y))

    def _in_words(self, y: Tensor, digits: int = 6) -> str:
        """A censored target in words: its value, its limit or its interval."""
        value, *_, upper = (_plain(number, digits) for number in self.in_units(y).tolist())
        return (f"> {value}", value, f"< {value}", f"{value} to {upper}")[int(y[1])]

    def to(self, device: torch.device | str) -> "Dataset":
        """The same data set on another device."""
        tensors = {n: v.to(device) for n, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors)  # type: ignore[arg-type]


def prepare(
    x: np.ndarray | pd.DataFrame,
    y: np.ndarray,
    *,
    feature_names: Sequence[str],
    target_name: str = "y",
    task: str | None = None,
    impute: str | None = None,
    missing_targets: bool = False,
    test_fraction: float = 0.2,
    seed: int = 0,
    fold: tuple[int, int] | None = None,
) -> Dataset:
    """Check, split and standardize; tensors have torch's default dtype and are on the CPU.

    The split of classes is stratified: each class has its share in both parts, and at least one
    row in the training part. Columns that are constant in the training part, up to the rounding of
    their numbers, become zeros, with a warning that names them.

    :param x: ``(N, D)``, numbers; columns of text (dtype ``object``) of a table become indicators.
    :param y: ``(N,)``, numbers or, for classes, text; of censored targets ``(N, 2)``, values and
        status, or ``(N, 3)``, with the upper ends of intervals (see ``models.CensoredRegression``).
    :param feature_names: D names, used in messages.
    :param target_name: name of the target, used in messages.
    :param task: ``"regression"``, ``"classification"``, ``"count"`` (whole numbers) or
        ``"share"`` (between 0 and 1), which are not standardized, ``"censored"``, numbers of which
        some are known within limits only, ``"times"``, the same above 0, which are divided by their
        geometric mean, or None to find it from ``y``.
    :param impute: what missing numbers (NaN) are filled in with, of the training part:
        ``"mean"``, ``"median"`` or ``"most_frequent"``; missing text is filled in with the most
        frequent one. None refuses them.
    :param missing_targets: leave out rows without a target, and say in the notes how many. False
        refuses them.
    :param test_fraction: share of the rows in the test part, between 0 and 1.
    :param seed: seed of the split.
    :param fold: ``(i, k)``: the test part is the i-th of k folds, 0 <= i < k, in place of a random
        share of the rows.
    :raises ValueError: for shapes that do not fit; fewer than 10 rows, or 5 in the training part;
        NaN, infinity, or numbers so large that squared errors overflow (the error names rows and
        columns); a constant target, or a target that the dtype cannot resolve; fewer than two
        classes; too few rows in each class for the test part or the folds; an unknown task; a test
        fraction outside (0, 1); a status that is none, or an interval without an upper end.
    """
    y, dtype = np.asarray(y), torch.get_default_dtype()
    one_of(task, "task", (None, *get_args(Task)))
    one_of(impute, "impute", (None, *get_args(Imputer)))
    known = None
    if task in CENSORED:
        y, known = _known(y, target_name)
    if x.ndim != 2 or y.shape != x.shape[:1] or x.shape[1] != len(feature_names):
        raise ValueError(
            f"x and y must be (N, D) and (N,) with D feature_names, but have shapes {x.shape} and "
            f"{y.shape} and {len(feature_names)} names"
        )
    frame = x if isinstance(x, pd.DataFrame) else pd.DataFrame(x, dtype=float)
    frame = frame.set_axis(list(feature_names), axis=1)
    numbers, notes = np.arange(len(y)) + 1, []
    if missing_targets and (missing := pd.isna(y)).any():
        frame, y, numbers = frame[~missing].reset_index(drop=True), y[~missing], numbers[~missing]
        known = None if known is None else known[~missing]
        notes.append(
            f"{int(missing.sum())} of {len(missing)} rows have no {target_name} and are left out."
        )
    if len(y) < _MIN_ROWS:
        raise ValueError(f"data: there are {len(y)} rows; at least {_MIN_ROWS} are needed")
    _check_values(frame, y, numbers, target_name, imputed=impute is not None)
    if task is None:
        task, note = _task_of(y, target_name)
        notes.append(note)
    class_names: tuple[str, ...] = ()
    labels = np.zeros(len(y), int)
    if task == "classification":
        values, labels = np.unique(y, return_inverse=True)
        _check_classes(values, y, target_name, numbers[0])
        y, class_names = labels, tuple(map(_plain, values))
    elif task == "count" and (bad := (y < 0) | (y != np.round(y.astype(float)))).any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"target: column {target_name!r} does not hold counts ({y[row]:g} in row "
            f"{numbers[row]}); say task='regression' (--task regression)"
        )
    elif task == "share" and (bad := ~((y > 0) & (y < 1))).any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"target: column {target_name!r} does not hold shares between 0 and 1 ({y[row]:g} in "
            f"row {numbers[row]}); move 0 and 1 inside, or say task='regression' (--task "
            "regression)"
        )
    elif task == "times" and (bad := y <= 0).any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"target: column {target_name!r} does not hold times above 0 ({y[row]:g} in row "
            f"{numbers[row]}); an interval from 0 is known to be smaller than its end (status 2)"
        )
    if known is not None:
        counts = zip(np.bincount(known[:, 0].astype(int), minlength=4), _KNOWN_AS, strict=True)
        parts = ", ".join(f"{count} {words}" for count, words in counts if count)
        notes.append(f"{target_name}: of {len(y)} rows {parts}.")
    test = (
        _random_rows(labels, test_fraction, seed)
        if fold is None
        else rows_of_fold(labels, fold, seed)
    )
    if not test.any() or (~test).sum() < _MIN_TRAINING_ROWS:
        raise ValueError(
            f"test_fraction={test_fraction:g} (--test-fraction) leaves {(~test).sum()} of the "
            f"{len(y)} rows to learn from and {test.sum()} for the test; at least "
            f"{_MIN_TRAINING_ROWS} and 1 are needed: change it, or give more rows of each class"
        )
    y_mean, y_sd = 0.0, 1.0
    if task != "classification":
        y = y.astype(float)
        y_mean, y_sd = float(y[~test].mean()), float(y[~test].std())
        if not torch.finfo(dtype).eps * abs(y_mean) < 0.01 * y_sd:
            raise ValueError(
                f"target: column {target_name!r} is constant or nearly so, with mean {y_mean:g} "
                f"and sd {y_sd:g}, which {dtype} cannot resolve: choose another target, or "
                "subtract a constant from it"
            )
        if task == "times":
            y_mean, y_sd = 0.0, float(np.exp(np.log(y[~test]).mean()))
        elif task not in ("regression", "censored"):
            y_mean, y_sd = 0.0, 1.0
        y = (y - y_mean) / y_sd
        if known is not None:
            upper = (known[:, 1:] - y_mean) / y_sd
            y = np.column_stack([y, known[:, 0], upper])
    features, x_mean, x_sd = _features(frame, ~test, impute)
    if impute:
        texts = frame.columns.drop(frame.select_dtypes("number").columns)
        ways = {"most frequent text": frame[texts], impute: frame.drop(columns=texts)}
        notes += [
            f"{count} missing values filled in with the {way.replace('_', ' ')} of the training "
            "rows."
            for way, part in ways.items()
            if (count := int(part.isna().sum().sum()))
        ]
    y_dtype = torch.int64 if task == "classification" else dtype
    share = f"{test_fraction:.3g} of the rows"
    if fold is not None:
        share = f"fold {fold[0] + 1} of {fold[1]}"
    by_class = ", of each class alike" if task == "classification" else ""
    return Dataset(
        x_train=torch.as_tensor(features.to_numpy()[~test], dtype=dtype, device="cpu"),
        y_train=torch.as_tensor(y[~test], dtype=y_dtype, device="cpu"),
        x_test=torch.as_tensor(features.to_numpy()[test], dtype=dtype, device="cpu"),
        y_test=torch.as_tensor(y[test], dtype=y_dtype, device="cpu"),
        feature_names=tuple(features.columns),
        target_name=target_name,
        task=task,
        class_names=class_names,
        y_mean=y_mean,
        y_sd=y_sd,
        x_mean=tuple(x_mean.tolist()),
        x_sd=tuple(x_sd.tolist()),
        test_rows=tuple(numbers[test].tolist()),
        split=f"at random, {share} for the test{by_class}; seed {seed}",
        notes=tuple(notes),
    )


def _known(y: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The values of censored targets, and their status with, where there are intervals, the upper
    ends ``(N, 1)`` or ``(N, 2)``.

    :raises ValueError: for another shape, a status that is none, or an upper end that is not above
        the value.
    """
    if y.ndim != 2 or y.shape[1] not in (2, 3):
        raise ValueError(
            f"target: {name} must be (N, 2), values and status, or (N, 3), with the upper ends of "
            f"intervals, got shape {y.shape}"
        )
    value, status = y[:, 0].astype(float), y[:, 1].astype(float)
    if (bad := ~np.isin(status, range(4)) & ~np.isnan(value)).any():
        row = int(np.flatnonzero(bad)[0])
        given = "missing" if np.isnan(status[row]) else f"{status[row]:g}"
        raise ValueError(
            f"status: that of {name} in row {row + 1} is {given}; write 0 where it is known to be "
            "larger than its value, 1 where it is the value, 2 where it is smaller, and 3 where it "
            "is between the value and an upper end"
        )
    if not (status == 3).any():
        return value, status[:, None]
    upper = y[:, 2].astype(float) if y.shape[1] == 3 else np.full_like(value, np.nan)
    upper = np.where(status == 3, upper, value)
    if (bad := (status == 3) & ~((upper > value) & np.isfinite(upper)) & ~np.isnan(value)).any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"upper: {name} is in an interval (status 3) in row {row + 1}, from {value[row]:g} to "
            f"{upper[row]:g}: give a larger number as its upper end (--upper)"
        )
    return value, np.column_stack([status, upper])


def _check_values(
    frame: pd.DataFrame, y: np.ndarray, rows: np.ndarray, target_name: str, *, imputed: bool
) -> None:
    """Check that no value is missing, and that squares of all numbers can be computed, even of
    numbers a thousand times larger.

    :param rows: their numbers in the source.
    """
    largest = torch.finfo(torch.get_default_dtype()).max ** 0.5 / 1000
    table = frame.assign(**{target_name: y})
    missing, numbers = table.isna(), table.select_dtypes("number")
    large = (numbers.abs() >= largest).reindex(columns=table.columns, fill_value=False)
    bad = large | missing
    if imputed:
        bad = large.assign(**{target_name: bad[target_name]})
    places = [
        f"row {rows[row]}: {quoted(table.columns[bad.iloc[row]])}"
        for row in np.flatnonzero(bad.any(axis=1))
    ]
    if places:
        remedy = ""
        if not large.any(axis=None):
            if bad.drop(columns=target_name).any(axis=None):
                remedy += ", or have features filled in with impute='median' (--impute median)"
            if missing[target_name].any():
                remedy += ", or have rows without a target left out by missing_targets=True "
                remedy += "(--missing-targets)"
        raise ValueError(
            "data: missing values, infinity or numbers too large to compute with in "
            f"{listed(places, '; ')}; correct them, or remove the rows or columns{remedy}"
        )


def _task_of(y: np.ndarray, name: str) -> tuple[str, str]:
    """The task that the target suggests, and a sentence that says why and how to change it."""
    values = len(pd.unique(y))
    if y.dtype.kind not in "iuf":
        return "classification", f"{name} holds text, {values} different ones: a classification."
    whole = bool(np.all(y == np.round(y)))
    # A constant is more likely a broken regression target than a single class.
    if whole and 1 < values <= _MAX_INTEGER_CLASSES:
        return "classification", (
            f"{name} holds {values} different whole numbers, so that it is taken as "
            f"{values} classes; if they are quantities, say --task regression, if they count "
            "something, --task count."
        )
    counts = "; if they count something, say --task count" if whole and y.min() >= 0 else ""
    return "regression", f"{name} holds numbers, {values} different ones: a regression{counts}."


def _check_classes(values: np.ndarray, y: np.ndarray, target_name: str, first: int) -> None:
    if len(values) < 2:
        raise ValueError(
            f"target: column {target_name!r} has the single class {_plain(values[0])!r}; at least "
            "two are needed"
        )
    if len(values) > len(y) // 2:
        raise ValueError(
            f"target: column {target_name!r} has {len(values)} different values ({_plain(y[0])!r} "
            f"in row {first}) in {len(y)} rows, too many for classes; if it is a quantity, make it "
            "numbers and say task='regression' (--task regression)"
        )


def _random_rows(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """The rows of a random test part: the share of each class, and never all its rows."""
    if not 0 < fraction < 1:
        raise ValueError(f"test_fraction={fraction} (--test-fraction) must lie between 0 and 1")
    rng = np.random.default_rng(seed)
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        test[rows[: min(round(fraction * len(rows)), len(rows) - 1)]] = True
    return test


def rows_of_fold(labels: np.ndarray, fold: tuple[int, int], seed: int) -> np.ndarray:
    """The rows of one of k folds; of classes each fold has its share."""
    from sklearn.model_selection import KFold, StratifiedKFold

    place, count = fold
    if not 0 <= place < count:
        raise ValueError(f"fold={fold} must be (i, k) with 0 <= i < k: k folds are 0 to k - 1")
    kind = StratifiedKFold if labels.any() else KFold
    splits = kind(count, shuffle=True, random_state=seed).split(labels[:, None], labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class with fewer rows than folds
        return np.isin(np.arange(len(labels)), list(splits)[place][1])


def _features(
    frame: pd.DataFrame, train: np.ndarray, impute: str | None
) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    """Numbers, then indicators of text, both as the training rows have them and standardized; their
    means and sds."""
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    numbers = frame.select_dtypes("number").columns
    encoder = OneHotEncoder(
        handle_unknown="ignore", sparse_output=False,
        feature_name_combiner=lambda name, text: f"{name}={text}",
    )  # fmt: skip
    number = SimpleImputer(strategy=impute, keep_empty_features=True) if impute else "passthrough"
    text = make_pipeline(SimpleImputer(strategy="most_frequent"), encoder)
    encoded = make_column_transformer(
        (number, numbers), (text, frame.columns.drop(numbers)), verbose_feature_names_out=False
    )
    scaler = StandardScaler()
    pipeline = make_pipeline(encoded, scaler).set_output(transform="pandas")
    values = pipeline.fit(frame[train]).transform(frame)
    # scikit-learn leaves what is constant up to rounding unscaled
    constant = ~np.isclose(values[train].std(ddof=0), 1.0)
    if constant.any():
        warn(
            f"constant in the training part, so set to zero: {quoted(values.columns[constant])}",
            "constant-columns",
        )
        values.loc[:, constant] = 0.0
    return values, scaler.mean_, scaler.scale_


def _plain(value: object, digits: int = 6) -> str:
    """A class or a number; numbers without a trailing .0."""
    return f"{value:.{digits}g}" if isinstance(value, (int, float, np.number)) else str(value)


def quoted(names: Iterable[object]) -> str:
    """The first few names in quotes."""
    return listed([repr(str(name)) for name in names])


def listed(items: Sequence[str], separator: str = ", ") -> str:
    """The first few items, and the number of further ones."""
    rest = len(items) - _MAX_LISTED
    return separator.join(items[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")

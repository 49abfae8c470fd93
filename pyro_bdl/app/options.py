"""The options of ``pyro-bdl compare``, with their types and help texts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from pyro_bdl import posteriors, references
from pyro_bdl.data.csv import quoted, read_csv
from pyro_bdl.data.dataset import IMPUTERS, TASKS, Dataset, load_csv
from pyro_bdl.data.examples import EXAMPLES
from pyro_bdl.data.programs import ACTIVATIONS, NOISES
from pyro_bdl.references import Reference

_USUAL = {"steps": None, "chains": 4, "warmup": 500, "draws": 500}
_QUICK = {"steps": 500, "chains": 2, "warmup": 100, "draws": 100}
_OF_FILES = ("target", "task", "thousands", "dates", "one_hot", "impute")


def _choice(names: Iterable[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise typer.BadParameter(f"{text!r} is unknown; choose {quoted(names, 'or')}")
        return text

    return parse


def _units(text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise typer.BadParameter(f"give numbers of units such as 50 or 50,50, not {text!r}")
    return tuple(map(int, text.split(",")))


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise typer.BadParameter(f"{text!r} must be positive and finite")
    return value


def _device(name: str) -> torch.device:
    there = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    there += ["mps"] if torch.backends.mps.is_available() else []
    try:
        found = torch.device(name)
        torch.zeros((), device=found).cpu()
    except (RuntimeError, AssertionError) as error:  # torch has no common error here
        raise typer.BadParameter(f"{name!r} is not there; there is: {', '.join(there)}") from error
    return found


def _names(text: str) -> tuple[str, ...]:
    if text.strip() == "all":
        return tuple(entry.name for entry in posteriors.entries())
    chosen = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not chosen:
        raise typer.BadParameter("name at least one posterior")
    for name in chosen:
        try:
            posteriors.get(name)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return chosen


def _panel(name: str) -> Callable[..., Any]:
    """The options of one panel of the help text, each made from its help and what it takes."""

    def option(text: str, metavar: str | None = None, flag: str = "", **more: Any) -> Any:
        names = [flag] if flag else []
        more |= {"help": text, "metavar": metavar, "rich_help_panel": name, "show_default": False}
        return typer.Option(*names, **more)

    return option


def _one_of(names: Iterable[str]) -> dict[str, Any]:
    return {"metavar": "|".join(names), "parser": _choice(names)}


_data, _network, _posterior, _run = map(_panel, ("Data", "Network", "Posteriors", "Run"))
_LIST = "from the list below"
_SHIPPED = ", ".join(references.names())


@dataclass(frozen=True)
class Options:
    """The options of ``pyro-bdl compare``; each field is an option of its name."""

    example: Annotated[
        str | None,
        _data(
            f"A built-in problem {_LIST}; default: in-between.", "NAME", parser=_choice(EXAMPLES)
        ),
    ] = None
    data: Annotated[
        Path | None, _data("A CSV file with a header; every other column is a feature.", "FILE")
    ] = None
    target: Annotated[str | None, _data("The column to predict.", "COLUMN")] = None
    separator: Annotated[str, _data(r"Between columns, \t for tabs; default: a comma.", "MARK")] = (
        ","
    )
    decimal: Annotated[str, _data("Before decimals; default: a point.", "MARK")] = "."
    thousands: Annotated[
        str | None, _data("Between groups of three digits; default: none.", "MARK")
    ] = None
    dates: Annotated[
        list[str] | None,
        _data(
            "A column of dates such as 2024-12-31, which becomes year, month, day, ...; several "
            "times for several columns.",
            "COLUMN",
        ),
    ] = None
    task: Annotated[
        str | None, _data("Default: found from the target, and said.", **_one_of(TASKS))
    ] = None
    one_hot: Annotated[bool, _data("Columns of text as zeros and ones.", flag="--one-hot")] = False
    impute: Annotated[
        str | None,
        _data(
            "Fill in missing features from the training rows; default: refuse them.",
            **_one_of(IMPUTERS),
        ),
    ] = None
    test_fraction: Annotated[float, _data("Of the rows; default: 0.2.", "SHARE")] = 0.2
    folds: Annotated[
        int | None,
        _data(
            "Fit all posteriors again on K splits of the data, and show mean scores.",
            "K",
            min=2,
            max=100,
        ),
    ] = None
    repeats: Annotated[int, _data("R times K splits; default: 1.", "R", min=1)] = 1
    reference: Annotated[
        str | None,
        _data(
            "A problem whose long NUTS run ships with the package, in place of data and of running "
            f"NUTS: {_SHIPPED}.",
            "NAME",
            parser=_choice(references.names()),
        ),
    ] = None
    hidden: Annotated[
        Any, _network("50, or 50,50 for two layers; default: 50.", "UNITS", parser=_units)
    ] = "50"
    activation: Annotated[str, _network("Default: tanh.", **_one_of(ACTIVATIONS))] = "tanh"
    noise: Annotated[
        str,
        _network(
            "Of a regression: one sd; a sd for each input; or Student-t, for outliers; default: "
            "normal.",
            **_one_of(NOISES),
        ),
    ] = "normal"
    prior_gain: Annotated[
        Any,
        _network(
            "The prior's sd of a weight is GAIN / sqrt(inputs of its layer); default: 1, or that "
            "of the built-in problem.",
            "GAIN",
            parser=_positive,
        ),
    ] = None
    guides: Annotated[
        Any,
        _posterior(
            f"Names {_LIST} with commas between, or all; default: those with a star.",
            "NAMES",
            parser=_names,
        ),
    ] = None
    steps: Annotated[
        int | None, _posterior("Gradient steps of each guide; default: its own.", min=1)
    ] = None
    chains: Annotated[int | None, _posterior("Markov chains; default: 4.", min=1)] = None
    warmup: Annotated[
        int | None,
        _posterior("Adapting iterations of each chain, which are not kept; default: 500.", min=0),
    ] = None
    draws: Annotated[int | None, _posterior("Draws of each chain; default: 500.", min=2)] = None
    max_tree_depth: Annotated[
        int,
        _posterior(
            "NUTS takes at most 2^DEPTH gradient steps per draw; default: 8.", "DEPTH", min=1
        ),
    ] = 8
    quick: Annotated[
        bool,
        _posterior(
            "A first look: " + ", ".join(f"--{key} {n}" for key, n in _QUICK.items()) + ".",
            flag="--quick",
        ),
    ] = False
    seed: Annotated[int, _run("Of all random numbers; default: 0.", min=0, max=2**32 - 1)] = 0
    device: Annotated[Any, _run("Such as cpu or cuda; default: cpu.", "DEVICE", parser=_device)] = (
        "cpu"
    )
    out: Annotated[
        Path,
        _run(
            "Of the results and of the finished posteriors, from which the same command goes on; "
            "default: pyro-bdl-out.",
            "DIR",
        ),
    ] = Path("pyro-bdl-out")
    fresh: Annotated[bool, _run("Fit all anew, also what is finished.", flag="--fresh")] = False
    details: Annotated[bool, _run("Print all columns of table.csv.", flag="--details")] = False
    quiet: Annotated[bool, _run("Print the answer only, and no bars.", flag="--quiet")] = False

    def names(self) -> tuple[str, ...]:
        """The chosen posteriors: by default those with a star, without NUTS if it ships."""
        if self.guides is not None:
            return self.guides
        names = [entry.name for entry in posteriors.entries() if entry.default]
        return tuple(name for name in names if name != "nuts" or self.reference is None)

    def gain(self) -> float:
        """The prior's gain: the chosen one, or that of the built-in problem."""
        if self.prior_gain is not None:
            return self.prior_gain
        return 1.0 if self.data is not None else EXAMPLES[self.example or "in-between"].gain

    def settings(self) -> posteriors.Options:
        """The options of the fits."""
        usual: dict[str, Any] = dict(_QUICK if self.quick else _USUAL)
        usual |= {key: getattr(self, key) for key in usual if getattr(self, key) is not None}
        return posteriors.Options(seed=self.seed, max_tree_depth=self.max_tree_depth, **usual)

    def with_reference(self) -> "tuple[Options, Reference | None]":
        """The options with the network of the shipped reference, if one is chosen.

        :raises ValueError: for other data or another network beside it.
        """
        if self.reference is None:
            return self, None
        found = references.load(self.reference)
        for name in ("example", "data", "folds", *_OF_FILES):
            if getattr(self, name):
                raise ValueError(
                    f"{_spelled(name)} has no effect with --reference, which has its data"
                )
        theirs = {
            "hidden": tuple(found.architecture["hidden"]),
            "activation": found.architecture["activation"],
            "noise": "normal",
            "prior_gain": found.architecture["gain"],
        }
        usual = {field.name: field.default for field in fields(self)} | {"hidden": (50,)}
        for name, value in theirs.items():
            if getattr(self, name) not in (usual[name], value):
                raise ValueError(
                    f"{_spelled(name)} has no effect with --reference, whose program has {value}"
                )
        return replace(self, **theirs), found

    def load(self, fold: tuple[int, int] | None = None, repeat: int = 0) -> Dataset:
        """The chosen data.

        :param fold: ``(i, k)``: the i-th of k folds as the test part.
        :param repeat: added to the seed.
        :raises ValueError: for options that do not fit together, and data that are refused.
        """
        if self.data is None:
            for name in _OF_FILES:
                if getattr(self, name):
                    raise ValueError(
                        f"{_spelled(name)} is of use with --data only; name a CSV file"
                    )
            example = EXAMPLES[self.example or "in-between"]
            return example.load(self.test_fraction, self.seed + repeat, fold)
        separator = self.separator.replace(r"\t", "\t")
        if self.example is not None:
            raise ValueError("--data and --example name two problems; choose one")
        if self.target is None:
            columns = quoted(read_csv(self.data, separator).columns)
            raise ValueError(
                f"--data needs --target, the column to predict: {self.data} has {columns}"
            )
        return load_csv(
            self.data,
            self.target,
            self.task,
            separator=separator,
            decimal=self.decimal,
            thousands=self.thousands,
            dates=self.dates or (),
            one_hot=self.one_hot,
            impute=self.impute,
            test_fraction=self.test_fraction,
            seed=self.seed + repeat,
            fold=fold,
        )

    def check(self, data: Dataset) -> None:
        """Check that noise and folds belong to the data.

        :raises ValueError: for another noise than the usual one of classes or counts, and folds of
            data without rows or with too few.
        """
        if self.noise != "normal" and data.task != "regression":
            raise ValueError(f"--noise is of use for a regression only, and this is a {data.task}")
        if self.folds is None:
            if self.repeats > 1:
                raise ValueError("--repeats is of use with --folds only")
            return
        if not data.test_rows:
            raise ValueError("--folds needs data with rows: this problem's test inputs are a grid")
        self.load(fold=(0, self.folds))


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"

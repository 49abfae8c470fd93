"""The options of ``pyro-bdl compare``: each a field, with its type and help."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from torch import nn

from pyro_bdl import posteriors, references
from pyro_bdl.data.csv import load_csv, read_csv
from pyro_bdl.data.dataset import CENSORED, Dataset, Imputer, Task, quoted
from pyro_bdl.data.examples import EXAMPLES
from pyro_bdl.data.programs import LIKELIHOODS, Activation, Likelihood, program

_USUAL = {"steps": None, "chains": 4, "warmup": 250, "draws": 300}
_QUICK = {"steps": 500, "chains": 2, "warmup": 100, "draws": 100}
_OF_FILES = (
    "target",
    "task",
    "thousands",
    "dates",
    "missing",
    "one_hot",
    "impute",
    "missing_targets",
    "status",
    "upper",
)
_OF_PROGRAM = ("hidden", "activation", "likelihood", "prior_gain")


def _units(text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise typer.BadParameter(f"give numbers of units such as 50 or 50,50, not {text!r}")
    return tuple(map(int, text.split(",")))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros((), device=device).cpu()
    except (RuntimeError, AssertionError) as error:  # torch has no common error here
        reason = str(error).splitlines()[0]
        raise typer.BadParameter(f"{name!r} cannot be used here: {reason}") from error
    return device


_data, _network, _fits, _run = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in ("Data", "Network", "Posteriors", "Run")
)
_LIST = "from the list below"
_FIRST_LOOK = ", ".join(f"--{name} {number}" for name, number in _QUICK.items())


@dataclass(frozen=True)
class Options:
    """The options of ``pyro-bdl compare``; each field is an option of its name."""

    example: Annotated[str | None, _data(help=f"A built-in problem {_LIST}.")] = None
    data: Annotated[Path | None, _data(help="A CSV file; every other column is a feature.")] = None
    target: Annotated[str | None, _data(help="The column to predict.")] = None
    separator: Annotated[str, _data(help=r"The mark between columns, \t for tabs.")] = ","
    decimal: Annotated[str, _data(help="The mark before decimals.")] = "."
    thousands: Annotated[str | None, _data(help="The mark between groups of three digits.")] = None
    dates: Annotated[
        list[str] | None,
        _data(help="A column of dates such as 2024-12-31; several times for several columns."),
    ] = None
    missing: Annotated[
        list[str] | None,
        _data(help="A text that stands for a missing value in every column; several times."),
    ] = None
    task: Annotated[Task | None, _data(help="Found from the target if it is not given.")] = None
    status: Annotated[
        str | None,
        _data(
            help="Of censored targets the column that says whether each is larger than its value "
            "(0), its value (1), smaller (2), or between it and --upper (3)."
        ),
    ] = None
    upper: Annotated[
        str | None, _data(help="The column with the upper ends of targets of status 3.")
    ] = None
    one_hot: Annotated[bool, _data("--one-hot", help="Columns of text as zeros and ones.")] = False
    impute: Annotated[
        Imputer | None, _data(help="Fill in missing features from the training rows.")
    ] = None
    missing_targets: Annotated[
        bool, _data("--missing-targets", help="Leave out rows without a target, with a note.")
    ] = False
    test_fraction: Annotated[float, _data(help="The share of the rows in the test part.")] = 0.2
    folds: Annotated[
        int | None, _data(help="Fit all again on K splits; show mean scores.", min=2, max=100)
    ] = None
    repeats: Annotated[int, _data(help="R times K splits.", min=1)] = 1
    reference: Annotated[
        str | None,
        _data(
            help="A problem whose long NUTS run ships with the package, in place of data and NUTS: "
            f"{', '.join(references.names())}."
        ),
    ] = None
    hidden: Annotated[
        Any,
        _network(help="50,50 for two layers; default: 50.", parser=_units, metavar="<units>"),
    ] = None
    activation: Annotated[Activation | None, _network(help="Default: tanh.")] = None
    likelihood: Annotated[
        Likelihood | None,
        _network(
            help="Default: normal, categorical, poisson or beta, by the task; all but normal ones "
            "need not say --task. Censored ones need --status."
        ),
    ] = None
    prior_gain: Annotated[
        float | None,
        _network(
            help="The prior's sd of a weight is GAIN / sqrt(inputs of its layer); default: 1, or "
            "that of the built-in problem."
        ),
    ] = None
    guides: Annotated[
        str | None,
        _fits(help=f"Names {_LIST} with commas between, or all; default: those with a star."),
    ] = None
    steps: Annotated[int | None, _fits(help="Gradient steps of each guide.", min=1)] = None
    chains: Annotated[int | None, _fits(help="Markov chains; default: 4.", min=1)] = None
    warmup: Annotated[
        int | None, _fits(help="Adapting iterations of each chain; default: 250.", min=0)
    ] = None
    draws: Annotated[int | None, _fits(help="Draws of each chain; default: 300.", min=2)] = None
    max_tree_depth: Annotated[
        int, _fits(help="NUTS takes at most 2^DEPTH gradient steps per draw.", min=1)
    ] = 10
    baselines: Annotated[
        bool,
        _fits(
            "--baselines",
            help="Rows by scikit-learn too (linear, random forest, boosting; TabPFN where its "
            "weights are), with the same scores and no verdict.",
        ),
    ] = False
    quick: Annotated[bool, _fits("--quick", help=f"A first look: {_FIRST_LOOK}.")] = False
    seed: Annotated[int, _run(help="Of all random numbers.", min=0, max=2**32 - 1)] = 0
    device: Annotated[
        Any, _run(help="Such as cpu or cuda.", parser=_device, metavar="<device>")
    ] = "cpu"
    out: Annotated[
        Path, _run(help="Of the results and the finished posteriors, from which it goes on.")
    ] = Path("pyro-bdl-out")
    fresh: Annotated[bool, _run("--fresh", help="Fit all anew, also what is finished.")] = False
    details: Annotated[bool, _run("--details", help="Print all columns of table.csv.")] = False
    quiet: Annotated[bool, _run("--quiet", help="Print the answer only, and no bars.")] = False

    def names(self) -> tuple[str, ...]:
        """The chosen posteriors: by default those with a star, without NUTS if it ships.

        :raises ValueError: for an unknown name.
        """
        entries = posteriors.entries()
        if self.guides is None:
            names = [entry.name for entry in entries if entry.default]
            return tuple(name for name in names if name != "nuts" or self.reference is None)
        if self.guides.strip() == "all":
            return tuple(entry.name for entry in entries)
        chosen = [name.strip() for name in self.guides.split(",") if name.strip()]
        if not chosen:
            raise ValueError("--guides: name at least one posterior")
        return tuple(dict.fromkeys(posteriors.get(name).name for name in chosen))

    def settings(self) -> posteriors.Options:
        """The options of the fits."""
        usual: dict[str, Any] = dict(_QUICK if self.quick else _USUAL)
        usual |= {key: getattr(self, key) for key in usual if getattr(self, key) is not None}
        return posteriors.Options(seed=self.seed, max_tree_depth=self.max_tree_depth, **usual)

    def load(self, fold: tuple[int, int] | None = None, repeat: int = 0) -> Dataset:
        """The chosen data, on the device.

        :param fold: ``(i, k)``: the i-th of k folds as the test part.
        :param repeat: added to the seed.
        :raises OSError: for a file that cannot be read.
        :raises ValueError: for options that do not fit together, and data that are refused.
        """
        split: Any = {"test_fraction": self.test_fraction, "fold": fold}
        split["seed"] = self.seed + repeat
        if self.reference is not None:
            self._refuse(
                ("example", "data", "folds", *_OF_FILES, *_OF_PROGRAM),
                "has no effect with --reference, which has its data and its program",
            )
            return references.load(self.reference).dataset.to(self.device)
        if self.folds is None and self.repeats > 1:
            raise ValueError("--repeats is of use with --folds only")
        if self.data is None:
            self._refuse(_OF_FILES, "is of use with --data only; name a CSV file")
            if self._example not in EXAMPLES:
                raise ValueError(f"--example: choose {quoted(EXAMPLES)}, not {self.example!r}")
            return EXAMPLES[self._example].load(**split).to(self.device)
        self._refuse(("example",), "and --data name two problems; choose one")
        separator = self.separator.replace(r"\t", "\t")
        if self.target is None:
            columns = quoted(read_csv(self.data, separator).columns)
            raise ValueError(
                f"--data needs --target, the column to predict: {self.data} has {columns}"
            )
        task = self.task
        if task is None and self.likelihood is not None:
            task = cast(Task, LIKELIHOODS[self.likelihood].task)
        if self.baselines and task in CENSORED:
            raise ValueError("--baselines: those of other libraries take no censored targets")
        return load_csv(
            self.data, self.target, task, separator=separator, decimal=self.decimal,
            thousands=self.thousands, dates=self.dates or (), missing=self.missing or (),
            one_hot=self.one_hot, impute=self.impute, missing_targets=self.missing_targets,
            status=self.status, upper=self.upper, **split,
        ).to(self.device)  # fmt: skip

    def program(self, data: Dataset) -> tuple[nn.Module, dict[str, str]]:
        """The program of the data, and its parts in words.

        :raises ValueError: for a likelihood or a network that do not fit the data.
        """
        if self.reference is not None:
            model, words = program(data, **references.load(self.reference).architecture)
        else:
            chosen: dict[str, Any] = {
                "activation": self.activation, "likelihood": self.likelihood,
                "gain": self.prior_gain,
            }  # fmt: skip
            if self.data is None:
                chosen["gain"] = self.prior_gain or EXAMPLES[self._example].gain
            known: dict[str, Any] = {
                name: value for name, value in chosen.items() if value is not None
            }
            model, words = program(data, self.hidden or (50,), **known)
        return model.to(self.device), words

    @property
    def _example(self) -> str:
        return self.example or "in-between"

    def _refuse(self, names: tuple[str, ...], why: str) -> None:
        for name in names:
            if getattr(self, name):
                raise ValueError(f"--{name.replace('_', '-')} {why}")

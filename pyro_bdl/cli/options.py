"""The options of the command ``pyro-bdl``."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import nn

from pyro_bdl import posteriors, references
from pyro_bdl._version import __version__
from pyro_bdl.cli.programs import NOISES
from pyro_bdl.data.csv import quoted, read_csv
from pyro_bdl.data.dataset import IMPUTERS, TASKS, Dataset, load_csv
from pyro_bdl.data.examples import EXAMPLES
from pyro_bdl.posteriors import Options
from pyro_bdl.references import Reference

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
EXAMPLE = "in-between"
_OUT = "pyro-bdl-out"
_NETWORK = {"hidden": "50", "activation": "tanh", "noise": "normal", "prior_gain": None}
_USUAL = {"steps": None, "chains": 4, "warmup": 500, "draws": 500}
_QUICK = {"steps": 500, "chains": 2, "warmup": 100, "draws": 100}

BAD_INPUT = 2  # the exit code


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser(
    compare: Callable[[argparse.Namespace], int], *others: Callable[[Any], None]
) -> argparse.ArgumentParser:
    """The command's parser; the parsed options hold ``run``, the function that does the work.

    :param compare: runs the subcommand ``compare``.
    :param others: functions that add further subcommands.
    """
    result = Parser(prog="pyro-bdl", description="Bayesian deep learning on Pyro programs.")
    result.add_argument("--version", action="version", version=f"pyro-bdl {__version__}")
    commands = result.add_subparsers(required=True, metavar="COMMAND", dest="command")
    command = commands.add_parser(
        "compare",
        help="fit several posteriors of one network, and compare them with NUTS",
        description="Fit several posteriors of a Bayesian neural network to a table of data, run\n"
        "NUTS on the same program as the reference, print the answer and one table, and\n"
        "write them with figures and a report. By default on a built-in problem.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=compare)
    add = add_data(command, EXAMPLE)
    add(
        "--folds",
        type=int,
        metavar="K",
        help="fit all posteriors again on K splits of the data, and show the means of the scores",
    )
    add("--repeats", type=int, default=1, metavar="R", help="R times K splits; default: 1")
    add(
        "--reference",
        metavar="NAME",
        help="a problem whose long NUTS run ships with the package, in place of data and of "
        f"running NUTS: {', '.join(references.names())}",
    )
    add = command.add_argument_group("network").add_argument
    add(
        "--hidden",
        default=_NETWORK["hidden"],
        metavar="UNITS",
        help="50, or 50,50 for two layers; default: %(default)s",
    )
    add(
        "--activation",
        choices=tuple(ACTIVATIONS),
        default=_NETWORK["activation"],
        help="default: %(default)s",
    )
    add(
        "--noise",
        choices=NOISES,
        default=_NETWORK["noise"],
        help="of a regression: one sd; a sd for each input; or Student-t, for outliers; default: "
        "%(default)s",
    )
    add(
        "--prior-gain",
        type=float,
        metavar="GAIN",
        help="the prior's sd of a weight is GAIN / sqrt(inputs of its layer); default: 1, or that "
        "of the built-in problem",
    )
    add = command.add_argument_group("posteriors").add_argument
    add(
        "--guides",
        metavar="NAMES",
        help="names from the list below, or all; default: those with a star",
    )
    add("--steps", type=int, help="gradient steps of each guide; default: each guide's own")
    for name, text in (
        ("chains", "Markov chains"),
        ("warmup", "adapting iterations of each chain, which are not kept"),
        ("draws", "draws of each chain"),
    ):
        add(f"--{name}", type=int, help=f"{text}; default: {_USUAL[name]}")
    add(
        "--max-tree-depth",
        type=int,
        default=8,
        metavar="DEPTH",
        help="NUTS takes at most 2^DEPTH gradient steps per draw; default: %(default)s",
    )
    quick = ", ".join(f"--{name} {value}" for name, value in _QUICK.items())
    add("--quick", action="store_true", help=f"a first look: {quick}")
    add = add_run(command)
    add(
        "--resume",
        metavar="DIR",
        help="keep each posterior in DIR as it is finished, and take those that are there: after a "
        "crash the same command goes on; the results are written there too, unless --out is given",
    )
    add("--details", action="store_true", help="print all columns that table.csv has")
    add("--quiet", action="store_true", help="print the answer only, and show no bars")
    for other in others:
        other(commands)
    return result


def add_data(command: argparse.ArgumentParser, default: str) -> Callable[..., Any]:
    """Add the options of the data, which ``load`` reads; returns what adds further ones.

    :param default: the built-in problem if none is chosen.
    """
    add = command.add_argument_group("data").add_argument
    add(
        "--example",
        choices=tuple(EXAMPLES),
        metavar="NAME",
        help=f"a built-in problem from the list of pyro-bdl compare --help; default: {default}",
    )
    add("--data", metavar="FILE", help="a CSV file with a header; every other column is a feature")
    add("--target", metavar="COLUMN", help="the column to predict")
    add("--separator", default=",", metavar="CHARACTER", help="between columns; default: a comma")
    add("--decimal", default=".", metavar="MARK", help="before decimals; default: a point")
    add("--thousands", metavar="MARK", help="between groups of three digits; default: none")
    add(
        "--dates",
        nargs="+",
        default=[],
        metavar="COLUMN",
        help="columns of dates such as 2024-12-31, which become year, month, day, ...",
    )
    add("--task", choices=TASKS, help="default: found from the target, and said")
    add("--one-hot", action="store_true", help="turn columns of text into zeros and ones")
    add(
        "--impute",
        choices=IMPUTERS,
        help="fill in missing features from the training rows; default: refuse them",
    )
    add("--test-fraction", type=float, default=0.2, metavar="SHARE", help="default: %(default)s")
    return add


def add_run(command: argparse.ArgumentParser) -> Callable[..., Any]:
    """Add the options of a run; returns the function that adds further ones to their group."""
    add = command.add_argument_group("run").add_argument
    add("--seed", type=int, default=0, help="seed of all random numbers; default: %(default)s")
    add("--device", default="cpu", help="such as cpu or cuda; default: %(default)s")
    add("--out", metavar="DIR", help=f"of the results; default: {_OUT}")
    return add


def out(options: argparse.Namespace) -> str:
    """The folder of the results."""
    return options.out or getattr(options, "resume", None) or _OUT


def _epilog() -> str:
    lines = [
        f"{'*' if entry.default else ' '} {entry.name:<21} {entry.description}"
        for entry in posteriors.entries()
    ]
    problems = [f"  {each.name:<21} {each.description}" for each in EXAMPLES.values()]
    return "\n".join(
        [
            "built-in problems:",
            *problems,
            "",
            "posteriors:",
            *lines,
            "",
            "Ctrl-C ends the current fit, and shows the table for the posteriors so far; after the",
            "last fit it leaves the figures out. A second Ctrl-C gives up at once. With --resume",
            "the same command then fits only what is missing.",
        ]
    )


def reference(options: argparse.Namespace) -> Reference | None:
    """The chosen reference posterior; its program takes the place of the options' one.

    :raises ValueError: for an unknown name, or other data beside it.
    """
    if options.reference is None:
        return None
    for name in ("example", "data", "target", "task", "dates", "one_hot", "impute", "folds"):
        if getattr(options, name):
            option = name.replace("_", "-")
            raise ValueError(f"--{option} has no effect with --reference, which has its data")
    found = references.load(options.reference)
    theirs = {
        "hidden": ",".join(map(str, found.architecture["hidden"])),
        "activation": found.architecture["activation"],
        "noise": "normal",
        "prior_gain": found.architecture["gain"],
    }
    for name, value in theirs.items():
        if getattr(options, name) not in (_NETWORK[name], value):
            option = name.replace("_", "-")
            raise ValueError(
                f"--{option} has no effect with --reference, whose program has {value}"
            )
        setattr(options, name, value)
    if options.guides is None:  # no other run of NUTS
        options.guides = ",".join(name for name in names(None) if name != "nuts")
    return found


def names(text: str | None) -> list[str]:
    """The chosen posteriors, by default those with a star.

    :raises ValueError: for an unknown name.
    """
    if text is None or text.strip() == "all":
        return [entry.name for entry in posteriors.entries() if text or entry.default]
    chosen = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not chosen:
        raise ValueError("--guides is empty; name at least one posterior")
    for name in chosen:
        try:
            posteriors.get(name)
        except ValueError as error:
            raise ValueError(f"--guides: {error}") from None
    return chosen


def settings(options: argparse.Namespace) -> Options:
    """Options of the fits.

    :raises ValueError: for numbers out of range.
    """
    usual = _QUICK if options.quick else _USUAL
    chosen = {name: _first_given(getattr(options, name), usual[name]) for name in usual}
    least = {"steps": 1, "chains": 1, "warmup": 0, "draws": 2, "max_tree_depth": 1, "seed": 0}
    chosen |= {"max_tree_depth": options.max_tree_depth, "seed": options.seed}
    for name, value in chosen.items():
        if value is not None and value < least[name]:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be at least {least[name]}, got {value}")
    check_run(options)
    return Options(**cast(Any, chosen))


def check_run(options: argparse.Namespace) -> None:
    """Check the seed and the share of test data.

    :raises ValueError: for numbers out of range.
    """
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed must be at least 0 and less than 2^32, got {options.seed}")
    if not 0 < options.test_fraction < 1:
        raise ValueError(f"--test-fraction must lie between 0 and 1, got {options.test_fraction:g}")


def _first_given(value: int | None, usual: int | None) -> int | None:
    return usual if value is None else value


def load(
    options: argparse.Namespace,
    default: str = EXAMPLE,
    *,
    fold: tuple[int, int] | None = None,
    repeat: int = 0,
) -> Dataset:
    """The chosen data.

    :param default: the built-in problem if none is chosen.
    :param fold: ``(i, k)``: the i-th of k folds as the test part.
    :param repeat: added to the seed.
    :raises ValueError: for options that do not fit together, and data that are refused.
    """
    if options.data is None:
        for name in ("target", "task", "thousands", "dates", "one_hot", "impute"):
            if getattr(options, name):
                option = name.replace("_", "-")
                raise ValueError(f"--{option} is of use with --data only; name a CSV file")
        example = EXAMPLES[options.example or default]
        found = example.load(options.test_fraction, options.seed + repeat, fold)
    else:
        if options.example is not None:
            raise ValueError("--data and --example name two problems; choose one")
        if options.target is None:
            columns = quoted(read_csv(Path(options.data), options.separator).columns)
            raise ValueError(
                f"--data needs --target, the column to predict: {options.data} has {columns}"
            )
        found = load_csv(
            options.data,
            options.target,
            options.task,
            separator=options.separator,
            decimal=options.decimal,
            thousands=options.thousands,
            dates=options.dates,
            one_hot=options.one_hot,
            impute=options.impute,
            test_fraction=options.test_fraction,
            seed=options.seed + repeat,
            fold=fold,
        )
    return found


def check_folds(options: argparse.Namespace, data: Dataset) -> None:
    """Check that the data can be split into the folds.

    :raises ValueError: for data without rows or with too few, or numbers out of range.
    """
    if options.repeats < 1 or (options.repeats > 1 and options.folds is None):
        raise ValueError("--repeats must be at least 1, and is of use with --folds only")
    if options.folds is None:
        return
    if options.reference is not None:
        raise ValueError("--folds splits data, but those of --reference are split already")
    if not data.test_rows:
        raise ValueError("--folds needs data with rows: this problem's test inputs are a grid")
    if not 2 <= options.folds <= 100:
        raise ValueError(f"--folds must lie between 2 and 100, got {options.folds}")
    load(options, fold=(0, options.folds))


def check_noise(options: argparse.Namespace, data: Dataset) -> None:
    """Check that the noise belongs to the task.

    :raises ValueError: if another noise than the usual one is chosen for classes or counts.
    """
    if options.noise != "normal" and data.task != "regression":
        raise ValueError(f"--noise is of use for a regression only, and this is a {data.task}")


def gain(options: argparse.Namespace) -> float:
    """The prior's gain: the chosen one, or that of the built-in problem.

    :raises ValueError: for a gain that is not positive and finite.
    """
    if options.prior_gain is None:
        return 1.0 if options.data is not None else EXAMPLES[options.example or EXAMPLE].gain
    if not 0 < options.prior_gain < float("inf"):
        raise ValueError(f"--prior-gain must be positive and finite, got {options.prior_gain:g}")
    return options.prior_gain


def device(name: str) -> torch.device:
    """The device of that name.

    :raises ValueError: if the device is not available.
    """
    there = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if torch.backends.mps.is_available():
        there.append("mps")
    try:
        found = torch.device(name)
        torch.zeros((), device=found).cpu()
    except Exception as error:  # torch raises many classes of errors here
        raise ValueError(f"--device {name!r} is not there; there is: {', '.join(there)}") from error
    return found


def hidden(text: str) -> list[int]:
    """The units of each hidden layer, from "50,50".

    :raises ValueError: for anything else.
    """
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if any(size < 1 for size in sizes):
        raise ValueError(f"--hidden must be numbers of units such as 50 or 50,50, got {text!r}")
    return sizes


def folder(name: str, files: Sequence[str] = (), option: str = "--out") -> Path:
    """Make a folder if it does not exist, and check that it can be written to.

    :param files: the files that will be written.
    :param option: which names the folder, for errors.
    :raises ValueError: if it cannot be written to, or if one of the files is a folder.
    """
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".pyro-bdl"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"{option}: cannot write to {name!r}: {error.strerror}") from error
    for file in files:
        if (path / file).is_dir():
            raise ValueError(
                f"{option}: {str(path / file)!r} is a folder, but a file of that name is to be "
                "written: remove it, or name another folder"
            )
    return path

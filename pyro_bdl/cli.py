"""The command ``pyro-bdl``."""

import argparse
import itertools
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import nn

from pyro_bdl import models, posteriors
from pyro_bdl._version import __version__
from pyro_bdl.compare import CAPTIONS, Comparison, compare
from pyro_bdl.comparison.costs import seconds_per_draw
from pyro_bdl.data import Dataset, load_csv, load_default
from pyro_bdl.errors import BdlWarning
from pyro_bdl.nn import bayesianize
from pyro_bdl.posteriors import Fit, Options, Problem
from pyro_bdl.priors import FanIn
from pyro_bdl.report import write_report

_ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
_REFERENCE = "nuts"
_USUAL = {"steps": None, "chains": 4, "warmup": 500, "draws": 500}
_QUICK = {"steps": 500, "chains": 2, "warmup": 100, "draws": 100}
# A step over fewer numbers than this is no faster on several threads, and on cores that other
# processes use as well it is many times slower, since the threads wait for each other.
_WORTH_THREADS = 2**19

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: done. 1: a posterior could not be fitted, the table is of the others. 2: bad input, said in
    one sentence on stderr. 130: Ctrl-C before there was anything to show.
    """
    options = _parser().parse_args(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("always", BdlWarning)
        warnings.showwarning = _show_warning
        try:
            return options.run(options)
        except _BadInput as error:
            _say(str(error))
            return BAD_INPUT
        except KeyboardInterrupt:
            _say("interrupted before there was anything to show")
            return INTERRUPTED


class _BadInput(Exception):
    """What the user gave cannot be worked with; the message says why and what to do."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pyro-bdl", description="Bayesian deep learning on Pyro programs.")
    parser.add_argument("--version", action="version", version=f"pyro-bdl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    command = commands.add_parser(
        "compare",
        help="fit several posteriors of one network, and hold them against NUTS",
        description="Fit several posteriors of a Bayesian neural network to a table of data, run\n"
        "NUTS on the same program as the reference, print one table, and write it with\n"
        "figures and a report. By default on scikit-learn's diabetes data.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=_compare)
    add = command.add_argument_group("data").add_argument
    add("--data", metavar="FILE", help="a CSV file with a header; every other column is a feature")
    add("--target", metavar="COLUMN", help="the column to predict")
    add("--task", choices=("regression", "classification"), help="default: found from the target")
    add("--one-hot", action="store_true", help="turn columns of text into zeros and ones")
    add("--test-fraction", type=float, default=0.2, metavar="SHARE", help="default: %(default)s")
    add = command.add_argument_group("network").add_argument
    add(
        "--hidden",
        default="50",
        metavar="UNITS",
        help="50, or 50,50 for two layers; default: %(default)s",
    )
    add("--activation", choices=tuple(_ACTIVATIONS), default="tanh", help="default: %(default)s")
    add = command.add_argument_group("posteriors").add_argument
    add(
        "--guides",
        metavar="NAMES",
        help="some of those below, or all; default: those with a star",
    )
    add("--steps", type=int, help="gradient steps of each guide; default: each guide's own")
    for name, text in (
        ("chains", "Markov chains"),
        ("warmup", "iterations of each chain that adapt and are not kept"),
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
    add = command.add_argument_group("run").add_argument
    add("--seed", type=int, default=0, help="of everything random; default: %(default)s")
    add("--device", default="cpu", help="such as cpu or cuda; default: %(default)s")
    add("--out", default="pyro-bdl-out", metavar="DIR", help="default: %(default)s")
    add("--details", action="store_true", help="print all columns that table.csv has")
    return parser


def _epilog() -> str:
    lines = [
        f"{'*' if entry.default else ' '} {entry.name:<21} {entry.description}"
        for entry in posteriors.entries()
    ]
    return "\n".join(
        [
            "posteriors:",
            *lines,
            "",
            "Ctrl-C ends the posterior at work, and shows the table for what there is.",
        ]
    )


# ---------------------------------------------------------------------------------- the command


def _compare(options: argparse.Namespace) -> int:
    with _bad_input():
        names = _names(options.guides)
        settings = _settings(options)
        device = _device(options.device)
        hidden = _hidden(options.hidden)
        folder = _folder(options.out)
        data = _load(options).to(device)
    torch.manual_seed(options.seed)
    model = _model(data, hidden, _ACTIVATIONS[options.activation]).to(device)
    features = data.x_train.shape[1]
    about = (
        f"{data.target_name}: {data.task}"
        + (f" into {len(data.class_names)} classes" if data.class_names else "")
        + f", {features} feature{'s' * (features > 1)}, {len(data.x_train)} training and "
        f"{len(data.x_test)} test rows; {options.hidden} hidden units ({options.activation})"
    )
    print(about, flush=True)
    with _threads(len(data.x_train) * max(hidden)):
        fits, failed = _fit_all(names, Problem(model, data.x_train, data.y_train), settings)
        if not fits:
            return FAILED if failed else INTERRUPTED
        comparison = _compared(model, fits, data, options.seed)
    units = _units(data)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    print(f"\n{comparison.to_text(width, details=options.details)}\n")
    print(textwrap.fill(f"{units} {_EXPLAINED}", width))
    made_with: dict[str, object] = {"data": "scikit-learn's diabetes data"}
    made_with |= {
        name.replace("_", " "): value
        for name, value in vars(options).items()
        if name not in _NOT_SHOWN and value is not None and value is not False
    }
    made_with |= {name: getattr(settings, name) for name in ("chains", "warmup", "draws")}
    made_with |= {fit.name: _shown(fit) for fit in fits}
    written = _write(comparison, fits, folder, data, [f"{about}. {units}"], made_with)
    print(f"Written to {folder}: {', '.join(path.name for path in written)}")
    return FAILED if failed else 0


_NOT_SHOWN = ("command", "run", "out", "quick", "guides", "steps", "details")
_WIDTH = 100  # of what is no terminal
_EXPLAINED = (
    "The report says below its table what each column means, and table.csv holds more of them "
    "(--details)."
)


def _fit_all(names: list[str], problem: Problem, options: Options) -> tuple[list[Fit], list[str]]:
    """The fits one after the other; Ctrl-C ends them, a failure does not."""
    fits: list[Fit] = []
    failed: list[str] = []
    width = max(map(len, names))
    for place, name in enumerate(names):
        try:
            fit = posteriors.fit(name, problem, options, progress=True)
        except KeyboardInterrupt:
            left = names[place:]
        except MemoryError as error:
            _say(f"{name} is left out: {error}")
            continue
        except Exception as error:  # one posterior's failure must not lose the others
            failed.append(name)
            _say(f"{name} could not be fitted: {type(error).__name__}: {error}")
            continue
        else:
            fits.append(fit)
            elbo = "" if fit.elbo is None else f"   ELBO {fit.elbo:.1f}"
            print(f"  {name.ljust(width)} {fit.seconds:7.1f} s{elbo}", flush=True)
            if not fit.interrupted:
                continue
            left = names[place + 1 :]
        _say(f"interrupted; not fitted: {', '.join(left) or 'none'}")
        break
    return fits, failed


def _compared(model: nn.Module, fits: list[Fit], data: Dataset, seed: int) -> Comparison:
    there = {fit.name: fit.posterior for fit in fits}
    return compare(
        model,
        there,
        data.x_test,
        data.y_test,
        reference=_REFERENCE if _REFERENCE in there else None,
        train=(data.x_train, data.y_train),
        seconds={fit.name: fit.seconds for fit in fits},
        elbos={fit.name: fit.elbo for fit in fits},
        log_evidences={fit.name: fit.log_evidence for fit in fits},
        draw_seconds={
            name: seconds_per_draw(model, posterior, data.x_test)
            for name, posterior in there.items()
        },
        peak_memory={fit.name: fit.peak_memory for fit in fits},
        target_scale=data.y_sd,
        target_shift=data.y_mean,
        seed=seed,
    )


def _write(
    comparison: Comparison,
    fits: list[Fit],
    folder: Path,
    data: Dataset,
    notes: list[str],
    settings: dict[str, object],
) -> list[Path]:
    """The table, the figures and the report."""
    written = [comparison.to_csv(folder / "table.csv")]
    figures = comparison.figures(
        target=data.target_name,
        features=[f"{name} (standardised)" for name in data.feature_names],
        train=(data.x_train, data.y_train * data.y_sd + data.y_mean),
        posteriors={fit.name: fit.posterior for fit in fits},
    )
    for name, figure in figures.items():
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=200)
    report = write_report(
        folder / "report.html",
        title=f"Posteriors of a neural network for {data.target_name}",
        rows=comparison.rows,
        columns=comparison.columns,
        details=comparison.details,
        verdicts=comparison.verdicts,
        warnings=comparison.warnings,
        figures={CAPTIONS[name]: figure for name, figure in figures.items()},
        notes=notes,
        settings=settings,
    )
    return [*written, report]


def _units(data: Dataset) -> str:
    if data.task == "classification":
        return "NLPD and ELBO are in nats; distances are between class probabilities."
    return (
        f"RMSE, CRPS and distances are in units of {data.target_name}; NLPD is in nats for them, "
        f"ELBO in nats for the standardised training targets."
    )


def _shown(fit: Fit) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in fit.settings.items())
    return f"{settings}, interrupted" if fit.interrupted else settings


def _model(data: Dataset, hidden: list[int], activation: Callable[[], nn.Module]) -> nn.Module:
    outputs = len(data.class_names) if data.task == "classification" else 1
    sizes = [data.x_train.shape[1], *hidden]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), activation()]
    network = bayesianize(nn.Sequential(*layers, nn.Linear(sizes[-1], outputs)), FanIn(1.0))
    kind = models.Classification if data.task == "classification" else models.Regression
    return kind(network, num_data=len(data.x_train))


@contextmanager
def _threads(numbers: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1 if numbers < _WORTH_THREADS else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -------------------------------------------------------------------------------- what is given


@contextmanager
def _bad_input() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        raise _BadInput(" ".join(str(error).split())) from error


def _names(text: str | None) -> list[str]:
    if text is None or text.strip() == "all":
        return [entry.name for entry in posteriors.entries() if text or entry.default]
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ValueError("--guides is empty; name at least one posterior")
    for name in names:
        try:
            posteriors.get(name)
        except ValueError as error:
            raise ValueError(f"--guides: {error}") from None
    return names


def _settings(options: argparse.Namespace) -> Options:
    usual = _QUICK if options.quick else _USUAL
    chosen = {name: _first_given(getattr(options, name), usual[name]) for name in usual}
    least = {"steps": 1, "chains": 1, "warmup": 0, "draws": 1, "max_tree_depth": 1, "seed": 0}
    chosen |= {"max_tree_depth": options.max_tree_depth, "seed": options.seed}
    for name, value in chosen.items():
        if value is not None and value < least[name]:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be at least {least[name]}, got {value}")
    if options.seed >= 2**32:
        raise ValueError(f"--seed must be less than 2^32, got {options.seed}")
    if not 0 < options.test_fraction < 1:
        raise ValueError(f"--test-fraction must lie between 0 and 1, got {options.test_fraction:g}")
    return Options(**cast(Any, chosen))


def _first_given(value: int | None, usual: int | None) -> int | None:
    return usual if value is None else value


def _load(options: argparse.Namespace) -> Dataset:
    split = {"test_fraction": options.test_fraction, "seed": options.seed}
    if options.data is None:
        for name in ("target", "task", "one_hot"):
            if getattr(options, name):
                option = name.replace("_", "-")
                raise ValueError(f"--{option} is of use with --data only; name a CSV file")
        return load_default(**split)
    if options.target is None:
        raise ValueError("--data needs --target, the name of the column to predict")
    return load_csv(options.data, options.target, options.task, one_hot=options.one_hot, **split)


def _device(name: str) -> torch.device:
    there = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if torch.backends.mps.is_available():
        there.append("mps")
    try:
        device = torch.device(name)
        torch.zeros((), device=device).cpu()
    except Exception as error:  # torch raises many kinds here
        raise ValueError(f"--device {name!r} is not there; there is: {', '.join(there)}") from error
    return device


def _hidden(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if any(size < 1 for size in sizes):
        raise ValueError(f"--hidden must be numbers of units such as 50 or 50,50, got {text!r}")
    return sizes


def _folder(name: str) -> Path:
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".pyro-bdl"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--out: cannot write to {name!r}: {error.strerror}") from error
    return folder


def _say(text: str) -> None:
    print(f"pyro-bdl: {text}", file=sys.stderr)


def _show_warning(message: Warning | str, *args: object, **kwargs: object) -> None:
    _say(f"warning: {message}")

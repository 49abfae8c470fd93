"""The command ``pyro-bdl``."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from pyro_bdl import models, posteriors
from pyro_bdl._version import __version__
from pyro_bdl.compare import Comparison, compare
from pyro_bdl.data import Dataset, load_csv, load_default
from pyro_bdl.nn import bayesianize
from pyro_bdl.priors import FanIn
from pyro_bdl.report import write_report

_ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
_REFERENCE = "nuts"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 0, 2 for bad input, 130 after Ctrl-C without a result."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, FileNotFoundError, OSError) as error:
        print(f"pyro-bdl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("pyro-bdl: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pyro-bdl", description="Bayesian deep learning on Pyro programs."
    )
    parser.add_argument("--version", action="version", version=f"pyro-bdl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "compare",
        help="fit several posteriors of one network and hold them against NUTS",
        description=(
            "Fit several posteriors of a Bayesian neural network to a table of data, run NUTS on "
            "the same program, and print one table; by default on scikit-learn's diabetes data."
        ),
        epilog="Posteriors:\n"
        + "\n".join(f"  {e.name:<22}{e.description}" for e in posteriors.entries()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=_compare)
    data = command.add_argument_group("data")
    data.add_argument("--data", metavar="FILE.csv", help="a CSV file with a header")
    data.add_argument("--target", metavar="COLUMN", help="the column to predict")
    data.add_argument("--task", choices=("regression", "classification"), help="default: found")
    data.add_argument("--one-hot", action="store_true", help="turn text columns into indicators")
    network = command.add_argument_group("network")
    network.add_argument("--hidden", default="50", help="hidden units, such as 50 or 50,50")
    network.add_argument("--activation", choices=tuple(_ACTIVATIONS), default="tanh")
    fit = command.add_argument_group("posteriors")
    names = ",".join(entry.name for entry in posteriors.entries())
    fit.add_argument("--guides", default=names, help=f"comma-separated, default {names}")
    fit.add_argument("--steps", type=int, help="gradient steps of each guide")
    fit.add_argument("--chains", type=int, default=4, help="NUTS chains, default 4")
    fit.add_argument("--warmup", type=int, default=300, help="adaptation per chain, default 300")
    fit.add_argument("--draws", type=int, default=300, help="draws per chain, default 300")
    fit.add_argument("--seed", type=int, default=0)
    fit.add_argument("--device", default="cpu", help="such as cpu or cuda, default cpu")
    command.add_argument("--out", default="pyro-bdl-out", metavar="DIR", help="default %(default)s")
    return parser


def _compare(options: argparse.Namespace) -> int:
    names = [name.strip() for name in options.guides.split(",") if name.strip()]
    if not names:
        raise ValueError("--guides is empty: name at least one posterior")
    for name in names:
        posteriors.get(name)
    for option in ("steps", "chains", "draws"):
        value = getattr(options, option)
        if value is not None and value < 1:
            raise ValueError(f"--{option} must be at least 1, got {value}")
    if options.warmup < 0:
        raise ValueError(f"--warmup must not be negative, got {options.warmup}")
    device = _device(options.device)
    sizes = _hidden(options.hidden)
    data = _load(options).to(device)
    torch.manual_seed(options.seed)
    model = _model(data, sizes, _ACTIVATIONS[options.activation]).to(device)
    print(
        f"{data.target_name}: {data.task}, {len(data.x_train)} training and {len(data.x_test)} "
        f"test rows, {data.x_train.shape[1]} features; hidden units {options.hidden}",
        flush=True,
    )
    fits = _fit_all(names, posteriors.Problem(model, data.x_train, data.y_train), options)
    if not fits:
        raise KeyboardInterrupt
    comparison = compare(
        model,
        {fit.name: fit.posterior for fit in fits},
        data.x_test,
        data.y_test,
        reference=_REFERENCE if any(fit.name == _REFERENCE for fit in fits) else None,
        seconds={fit.name: fit.seconds for fit in fits},
        elbos={fit.name: fit.elbo for fit in fits},
        target_scale=data.y_sd,
        target_shift=data.y_mean,
    )
    print(f"\n{comparison}\n")
    written = _write(comparison, data, options)
    print("written: " + ", ".join(map(str, written)))
    return 0


def _fit_all(
    names: list[str], problem: posteriors.Problem, options: argparse.Namespace
) -> list[posteriors.Fit]:
    """Fit one posterior after the other; Ctrl-C ends it with those that there are."""
    settings = posteriors.Options(
        seed=options.seed,
        steps=options.steps,
        chains=options.chains,
        warmup=options.warmup,
        draws=options.draws,
    )
    fits: list[posteriors.Fit] = []
    for name in names:
        try:
            fit = posteriors.fit(name, problem, settings, progress=True)
        except KeyboardInterrupt:
            break
        fits.append(fit)
        print(f"  {name}: {fit.seconds:.1f} s", flush=True)
        if fit.interrupted:
            break
    if len(fits) < len(names):
        missing = ", ".join(names[len(fits) :])
        print(f"pyro-bdl: interrupted; not fitted: {missing or 'none'}", file=sys.stderr)
    return fits


def _load(options: argparse.Namespace) -> Dataset:
    if options.data is None:
        if options.target is not None:
            raise ValueError("--target names a column of --data, which is missing")
        return load_default(seed=options.seed)
    if options.target is None:
        raise ValueError("--data needs --target, the name of the column to predict")
    return load_csv(
        options.data, options.target, options.task, one_hot=options.one_hot, seed=options.seed
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        there = "cpu" + (", cuda" if torch.cuda.is_available() else "")
        raise ValueError(f"--device {name!r} is not there; there is: {there}") from error
    return device


def _hidden(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if any(size < 1 for size in sizes):
        raise ValueError(f"--hidden must be positive numbers such as 50 or 50,50, got {text!r}")
    return sizes


def _model(data: Dataset, hidden: list[int], activation: type[nn.Module]) -> nn.Module:
    outputs = len(data.class_names) if data.task == "classification" else 1
    sizes = [data.x_train.shape[1], *hidden]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), activation()]
    network = bayesianize(nn.Sequential(*layers, nn.Linear(sizes[-1], outputs)), FanIn(1.0))
    kind = models.Classification if data.task == "classification" else models.Regression
    return kind(network, num_data=len(data.x_train))


def _write(comparison: Comparison, data: Dataset, options: argparse.Namespace) -> list[Path]:
    """The table, the figures and the report, in the folder of the results."""
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of matplotlib on fonts and layouts
        figures = comparison.figures()
        written = [comparison.to_csv(folder / "table.csv")]
        for i, figure in enumerate(figures.values(), 1):
            path = folder / f"figure-{i}.png"
            figure.savefig(path, dpi=150)
            written.append(path)
        settings = {k: v for k, v in vars(options).items() if k not in ("run", "out")}
        report = write_report(
            folder / "report.html",
            title=f"Posteriors of a network for {data.target_name}",
            rows=comparison.rows,
            columns=comparison.columns,
            figures=figures,
            notes=[f"{name}: {text}." for name, text in comparison.verdicts.items()],
            settings=settings,
        )
    return [*written, report]

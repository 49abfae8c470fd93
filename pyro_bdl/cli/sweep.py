"""``pyro-bdl sweep``: a mean-field network over temperatures and widths."""

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import nn

from pyro_bdl import temperature
from pyro_bdl.cli import options as command
from pyro_bdl.cli.programs import program
from pyro_bdl.cli.shared import bad_input, limited_threads
from pyro_bdl.data.dataset import Dataset
from pyro_bdl.guides import AutoMeanField
from pyro_bdl.temperature import Sweep
from pyro_bdl.utils.files import atomic_write
from pyro_bdl.utils.random_state import process_seeded
from pyro_bdl.utils.validation import check_temperature

_TABLE = "sweep.csv"
_FIGURES = ("scores", "kl", "scores_by_tau")
_FILES = (_TABLE, *(f"sweep_{name}.png" for name in _FIGURES))
_WIDTH = 100  # of output that is not a terminal


def add_command(commands: Any) -> None:
    """Add the subcommand to those of the command's parser."""
    parser = commands.add_parser(
        "sweep",
        help="train a mean-field network over temperatures and widths",
        description="Train mean-field networks of one hidden layer at many temperatures and\n"
        "widths, score them on test data, print one table and write it with figures. The\n"
        "temperature eta weighs the KL; eta = tau p / N for p data and N neurons keeps it\n"
        "in balance with the likelihood (Huix et al. 2022). By default on scikit-learn's\n"
        "diabetes data.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_sweep)
    command.add_data(parser, "diabetes")
    add = parser.add_argument_group("networks").add_argument
    add(
        "--widths",
        default="10,50,250",
        metavar="UNITS",
        help="hidden units of each network; default: %(default)s",
    )
    names = tuple(command.ACTIVATIONS)
    add("--activation", choices=names, default="relu", help="default: %(default)s")
    add = parser.add_argument_group("temperatures").add_argument
    add(
        "--taus",
        default="0.001,0.01,0.1,1",
        metavar="NUMBERS",
        help="temperatures per neuron and datum; default: %(default)s",
    )
    add(
        "--etas",
        default="1",
        metavar="NUMBERS",
        help="temperatures eta, besides; default: %(default)s, the Bayesian posterior",
    )
    add("--steps", type=int, default=2000, help="gradient steps; default: %(default)s")
    add("--draws", type=int, default=100, help="draws for predictions; default: %(default)s")
    command.add_run(parser)


def _sweep(options: argparse.Namespace) -> int:
    with bad_input():
        command.check_run(options)
        widths = _numbers("widths", options.widths, int)
        taus = _numbers("taus", options.taus, float)
        etas = _numbers("etas", options.etas, float)
        for name, least in (("steps", 1), ("draws", 2)):
            if getattr(options, name) < least:
                raise ValueError(f"--{name} must be at least {least}, got {getattr(options, name)}")
        device = command.device(options.device)
        data = command.load(options, "diabetes").to(device)
        folder = command.folder(command.out(options), _FILES)
    print(f"{data.target_name}: {data.task}, {len(data.x_train)} training rows", flush=True)
    activation = command.ACTIVATIONS[options.activation]

    def network(width: int) -> nn.Module:
        return program(data, [width], activation, noise="normal", gain=1.0)[0].to(device)

    numbers = len(data.x_train) * max(widths) * (len(taus) + len(etas))
    with process_seeded(options.seed, device), limited_threads(numbers):
        found = temperature.sweep(
            network,
            AutoMeanField,
            (data.x_train, data.y_train),
            (data.x_test, data.y_test),
            taus=taus,
            etas=etas,
            widths=widths,
            steps=options.steps,
            learning_rate=0.02,
            num_particles=4,
            num_samples=options.draws,
            seed=options.seed,
            progress=None,
        )
    _write(found, folder)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    print(f"\n{found.to_text(width)}\n\n{_read(found, data)}")
    print(f"Written to {folder}: {', '.join(_FILES)}")
    return 0


def _numbers(name: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    """Positive numbers from "1,10,100".

    :raises ValueError: for anything else.
    """
    try:
        found = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [0]
    try:
        return [check_temperature(value) and value for value in found]
    except ValueError as error:
        raise ValueError(f"--{name} must be positive numbers such as 1,10, got {text!r}") from error


def _write(found: Sweep, folder: Path) -> None:
    found.to_csv(folder / _TABLE)
    for name, figure in found.figures().items():
        _save(figure, folder / f"sweep_{name}.png")


def _save(figure: Figure, path: Path) -> None:
    with atomic_write(path) as part:
        figure.savefig(part, dpi=200)


def _read(found: Sweep, data: Dataset) -> str:
    best = min(found.rows, key=lambda row: row["nlpd"])
    units = "" if data.task == "classification" else ", for standardized targets"
    return (
        f"Lowest NLPD: {best['nlpd']:.3g} nats{units}, at N = {best['neurons']}, "
        f"eta = {best['eta']:.3g} (tau = {best['tau']:.3g})."
    )

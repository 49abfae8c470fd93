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

import torch
from torch import nn

from pyro_bdl import models, posteriors
from pyro_bdl.cli import options as command
from pyro_bdl.comparison.compare import compare
from pyro_bdl.comparison.costs import seconds_per_draw
from pyro_bdl.comparison.figures import CAPTIONS
from pyro_bdl.comparison.result import Comparison
from pyro_bdl.data.dataset import Dataset
from pyro_bdl.errors import BdlWarning
from pyro_bdl.nn import bayesianize
from pyro_bdl.posteriors import Fit, Options, Problem
from pyro_bdl.priors import FanIn
from pyro_bdl.report import write_report

_REFERENCE = "nuts"
# A step over fewer numbers than this is no faster on several threads, and on cores that other
# processes use as well it is many times slower, since the threads wait for each other.
_WORTH_THREADS = 2**19

FAILED, INTERRUPTED = 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: done. 1: a posterior could not be fitted, the table is of the others. 2: bad input, said in
    one sentence on stderr. 130: Ctrl-C before there was anything to show.
    """
    options = command.parser(_compare).parse_args(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("always", BdlWarning)
        warnings.showwarning = _show_warning
        try:
            return options.run(options)
        except _BadInput as error:
            _say(str(error))
            return command.BAD_INPUT
        except KeyboardInterrupt:
            _say("interrupted before there was anything to show")
            return INTERRUPTED


class _BadInput(Exception):
    """What the user gave cannot be worked with; the message says why and what to do."""


# ---------------------------------------------------------------------------------- the command


def _compare(options: argparse.Namespace) -> int:
    with _bad_input():
        names = command.names(options.guides)
        settings = command.settings(options)
        device = command.device(options.device)
        hidden = command.hidden(options.hidden)
        folder = command.folder(options.out)
        data = command.load(options).to(device)
    torch.manual_seed(options.seed)
    model = _model(data, hidden, command.ACTIVATIONS[options.activation]).to(device)
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


def _say(text: str) -> None:
    print(f"pyro-bdl: {text}", file=sys.stderr)


def _show_warning(message: Warning | str, *args: object, **kwargs: object) -> None:
    _say(f"warning: {message}")

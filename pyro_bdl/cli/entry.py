"""The command ``pyro-bdl``."""

import argparse
import json
import shlex
import shutil
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from matplotlib.figure import Figure
from torch import nn

from pyro_bdl import posteriors
from pyro_bdl.cli import cross_validation
from pyro_bdl.cli import options as command
from pyro_bdl.cli.kept import Kept, identity
from pyro_bdl.cli.programs import check_memory, program
from pyro_bdl.cli.progress_table import ProgressTable
from pyro_bdl.cli.provenance import provenance
from pyro_bdl.cli.shared import BadInput, bad_input, limited_threads, say
from pyro_bdl.cli.terminal import gives_up_at_second_interrupt, told_on_stderr
from pyro_bdl.comparison.captions import CAPTIONS
from pyro_bdl.comparison.columns import columns
from pyro_bdl.comparison.compare import compare
from pyro_bdl.comparison.costs import seconds_per_draw
from pyro_bdl.comparison.held_out import PredictiveDraws
from pyro_bdl.comparison.page import write_page
from pyro_bdl.comparison.result import Comparison
from pyro_bdl.data.dataset import Dataset
from pyro_bdl.errors import BdlWarning, UnusableDrawsError
from pyro_bdl.posteriors import Fit, Options, Problem
from pyro_bdl.report import Further
from pyro_bdl.samples import Samples
from pyro_bdl.utils.files import LenientStream, atomic_write
from pyro_bdl.utils.interrupts import deferred_interrupt
from pyro_bdl.utils.progress import hidden, logger, quiet
from pyro_bdl.utils.random_state import process_seeded
from pyro_bdl.utils.tables import to_csv, to_text

_REFERENCE, _KNOWN = "nuts", "reference"
_TABLE, _REPORT, _NUMBERS = "table.csv", "report.html", "report.json"
_FILES = (_TABLE, _REPORT, _NUMBERS, *(f"{name}.png" for name in CAPTIONS))
FAILED, INTERRUPTED = 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: success. 1: a posterior could not be fitted or scored, or a file could not be written; all
    other results are there. 2: bad input, with one sentence on stderr. 130: Ctrl-C before all
    results were shown.
    """
    output: Any = LenientStream(sys.stdout)
    errors: Any = LenientStream(sys.stderr)
    with (
        redirect_stdout(output), redirect_stderr(errors), warnings.catch_warnings(),
        told_on_stderr(), gives_up_at_second_interrupt(),
    ):  # fmt: skip
        options = command.parser(_compare).parse_args(arguments)
        given = sys.argv[1:] if arguments is None else arguments
        options.line = shlex.join(["pyro-bdl", *map(str, given)])
        warnings.simplefilter("always", BdlWarning)
        warnings.showwarning = _shown_once()
        try:
            with quiet(getattr(options, "quiet", False)):
                return options.run(options)
        except BadInput as error:
            say(str(error))
            return command.BAD_INPUT
        except KeyboardInterrupt:
            say("interrupted")
            return INTERRUPTED


def script() -> NoReturn:
    """Run the command as a process, which a Ctrl-C while it exits ends without a traceback."""
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


# ---------------------------------------------------------------------------------- the command


def _compare(options: argparse.Namespace) -> int:
    with bad_input():
        reference = command.reference(options)
        names = command.names(options.guides)
        settings = command.settings(options)
        device = command.device(options.device)
        hidden, gain = command.hidden(options.hidden), command.gain(options)
        data = (command.load(options) if reference is None else reference.dataset).to(device)
        command.check_noise(options, data)
        check_memory(data, hidden)
        command.check_folds(options, data)
        if options.resume is not None:
            command.folder(options.resume, option="--resume")
        folder = command.folder(command.out(options), _FILES)
    about = _about(data, options)
    if not options.quiet:
        print("\n".join([about, *data.notes]), flush=True)
    comparison, files = None, _Files(folder)
    with process_seeded(options.seed, device), limited_threads(len(data.x_train) * max(hidden)):
        activation = command.ACTIVATIONS[options.activation]
        model, parts = program(data, hidden, activation, noise=options.noise, gain=gain)
        model = model.to(device)
        problem = Problem(model, data.x_train, data.y_train)
        kept = None
        if options.resume is not None:
            with bad_input():
                kept = Kept(Path(options.resume), identity(data, parts, settings))
        table = ProgressTable(data, options.seed, names, shown=not options.quiet)
        fits, failed = _fit_all(names, problem, settings, kept=kept, table=table)
        if not fits:
            return FAILED if failed else INTERRUPTED
        code = FAILED if any(each.is_error for each in failed.values()) else 0
        try:
            with deferred_interrupt() as pressed:
                known = None if reference is None else reference.draws()
                comparison = _compared(model, fits, data, options.seed, failed, known)
                figures = {} if pressed.is_set() else _figures(comparison, fits, data)
                if pressed.is_set():
                    say("interrupted: there are no figures")
                made = provenance(options.line, options, settings, data, parts, fits)
                validated = None
                try:
                    validated = _validated(options, names, settings, device, kept)
                except Exception as error:  # the comparison must not be lost
                    say(f"the splits could not be scored: {type(error).__name__}: {error}")
                    code = FAILED
                _write(comparison, figures, files, data, about, made, validated)
        except KeyboardInterrupt:
            say("interrupted")
            code = INTERRUPTED
        except Exception as error:  # any error: the fits must not be lost
            say(f"the posteriors could not be compared: {type(error).__name__}: {error}")
            code = FAILED
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    if comparison is None:
        print(f"\n{_keep(fits, files)}\n")
    elif options.quiet:
        print(textwrap.fill(comparison.summary, width, break_on_hyphens=False))
    else:
        print(f"\n{comparison.to_text(width, details=options.details)}\n")
        print(textwrap.fill(f"{_units(data)} {_EXPLAINED}", width))
    if comparison is not None and not {fit.name for fit in fits} <= set(comparison.evaluations):
        code = code or FAILED
    files.clear()
    if files.written:
        print(f"Written to {folder}: {', '.join(files.written)}")
    return FAILED if files.failed and code == 0 else code


def _about(data: Dataset, options: argparse.Namespace) -> str:
    features = data.x_train.shape[1]
    return (
        f"{data.target_name}: {data.task}"
        + (f" into {len(data.class_names)} classes" if data.class_names else "")
        + f", {features} feature{'s' * (features > 1)}, {len(data.x_train)} training and "
        f"{len(data.x_test)} test rows; {options.hidden} hidden units ({options.activation})"
        + (f", {options.noise} noise" if options.noise != "normal" else "")
    )


_WIDTH = 100  # of output that is not a terminal
_EXPLAINED = (
    "The report says below its table what each column means, and table.csv holds more of them "
    "(--details)."
)


@dataclass(frozen=True)
class _Failure:
    """A posterior that is left out.

    :param reason: why, for its row of the table.
    :param is_error: whether the exit code says so; one that is too large for the memory is none.
    """

    reason: str
    is_error: bool


def _fit_all(
    names: list[str],
    problem: Problem,
    options: Options,
    *,
    kept: Kept | None = None,
    table: ProgressTable | None = None,
) -> tuple[list[Fit], dict[str, _Failure]]:
    """Fit one posterior after another; Ctrl-C ends the loop, a failure does not.

    :param kept: fits that are finished, and where further ones are kept.
    :param table: shows the row of each fit.
    """
    fits: list[Fit] = []
    failed: dict[str, _Failure] = {}
    for place, name in enumerate(names):
        left, reason, is_error = names[place:], "", True
        try:
            fit = None if kept is None else kept.find(name, problem)
            found = fit is not None
            if fit is None:
                fit = posteriors.fit(name, problem, options, progress=not hidden(None))
            fits.append(fit)
            left = names[place + 1 :]
            if kept is not None and not found and not fit.interrupted:
                kept.keep(fit)
            if table is not None:
                table.add(problem.model, fit, is_kept=found)
            interrupted = fit.interrupted
        except KeyboardInterrupt:
            interrupted = True
        except MemoryError as error:
            reason, is_error = f"left out: {error}", False
            say(f"{name} is {reason}")
        except Exception as error:  # one posterior's failure must not lose the others
            reason = f"could not be fitted: {type(error).__name__}: {error}"
            say(f"{name} {reason}")
        if reason:
            failed[name] = _Failure(reason, is_error)
            if table is not None:
                table.add_failure(name, reason)
            continue
        if interrupted:
            say(f"interrupted; not fitted: {', '.join(left) or 'none'}")
            break
    return fits, failed


def _compared(
    model: nn.Module,
    fits: list[Fit],
    data: Dataset,
    seed: int,
    failed: Mapping[str, _Failure],
    known: PredictiveDraws | None = None,
) -> Comparison:
    """Compare the posteriors, leaving out those whose draws cannot be scored.

    :param failed: posteriors that could not be fitted, which get a row without numbers.
    :param known: a shipped reference posterior.
    :raises UnusableDrawsError: if no posterior is left.
    """
    costs = {
        fit.name: replace(fit.costs, draw_seconds=_seconds_per_draw(model, fit, data))
        for fit in fits
    }
    reasons = {name: failure.reason for name, failure in failed.items()}
    while True:
        there: dict[str, Any] = {fit.name: fit.posterior for fit in fits}
        reference = _REFERENCE if _REFERENCE in there else None
        if known is not None:
            reference, there[_KNOWN] = _KNOWN, known.to(data.y_test.device)
        try:
            found = compare(
                model,
                there,
                data.x_test,
                data.y_test,
                reference=reference,
                train=(data.x_train, data.y_train),
                costs={fit.name: costs[fit.name] for fit in fits},
                target_scale=data.y_sd,
                target_shift=data.y_mean,
                seed=seed,
            )
            return found.with_failures(reasons)
        except UnusableDrawsError as error:
            others = [fit for fit in fits if fit.name != error.posterior]
            if not others or len(others) == len(fits):
                raise
            say(f"{error.posterior} is left out: {error}")
            reasons[str(error.posterior)] = f"left out: {error}"
            fits = others


def _validated(
    options: argparse.Namespace,
    names: list[str],
    settings: Options,
    device: torch.device,
    kept: Kept | None,
) -> Further | None:
    """The table of scores over splits, if ``--folds`` asks for it."""
    if options.folds is None:
        return None
    hidden_units = command.hidden(options.hidden)
    activation = command.ACTIVATIONS[options.activation]

    def scores(repeat: int) -> Iterator[dict[str, dict[str, float]]]:
        datasets, problems, parts = [], [], []
        for fold in range(options.folds):
            data = command.load(options, fold=(fold, options.folds), repeat=repeat).to(device)
            model, words = program(
                data, hidden_units, activation, noise=options.noise, gain=command.gain(options)
            )
            datasets.append(data)
            problems.append(Problem(model.to(device), data.x_train, data.y_train))
            if kept is not None:
                name = f"split-{repeat + 1}-{fold + 1}-of-{options.folds}"
                parts.append(kept.part(name, identity(data, words, settings)))
        fits = _fit_folds(names, problems, settings, parts)
        for fold, (data, problem) in enumerate(zip(datasets, problems, strict=True)):
            found = compare(
                problem.model,
                {name: of_folds[fold].posterior for name, of_folds in fits.items()},
                data.x_test,
                data.y_test,
                reference=None,
                target_scale=data.y_sd,
                target_shift=data.y_mean,
                seed=options.seed,
            )
            yield {row["posterior"]: row for row in found.rows}

    found, interrupted = cross_validation.splits(options.repeats, scores)
    if interrupted:
        say(f"interrupted: {len(found)} splits were scored")
    if len(found) < 2:
        return None
    rows, shown = cross_validation.summarized(found, names, _REFERENCE, options.folds)
    if not options.quiet:
        print(f"\nOver {len(found)} splits:\n\n{to_text(rows, shown)}")
    heading = f"Scores over {len(found)} splits"
    return Further(heading, rows, shown, cross_validation.NOTE)


def _fit_folds(
    names: list[str], problems: list[Problem], options: Options, kept: Sequence[Kept]
) -> dict[str, list[Fit]]:
    """The fits of each posterior to all folds; a failure leaves the posterior out.

    :param kept: of each fold, where its finished fits are; empty: nowhere.
    :raises KeyboardInterrupt: for Ctrl-C, also where a fit ended early and kept what it had.
    """
    fits: dict[str, list[Fit]] = {}
    for name in names:
        known = [part.find(name, of) for part, of in zip(kept, problems, strict=bool(kept))]
        there = [fit for fit in known if fit is not None]
        if len(there) == len(problems):
            fits[name] = there
            continue
        try:
            fits[name] = posteriors.fit_together(name, problems, options, progress=not hidden(None))
        except MemoryError as error:
            say(f"{name} is left out of the splits: {error}")
        except Exception as error:  # one posterior's failure must not lose the others
            say(f"{name} could not be fitted to the splits: {type(error).__name__}: {error}")
        else:
            if any(each.interrupted for each in fits[name]):
                raise KeyboardInterrupt
            for part, fit in zip(kept, fits[name], strict=bool(kept)):
                part.keep(fit)
    return fits


def _seconds_per_draw(model: nn.Module, fit: Fit, data: Dataset) -> float | None:
    try:
        return seconds_per_draw(model, fit.posterior, data.x_test)
    except Exception:  # compare reports what is wrong with the draws
        return None


# -------------------------------------------------------------------------------------- results


class _Files:
    """The files of one run; if a file cannot be written, this is reported, and the others are
    written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: list[str] = []
        self.failed = False

    def write(self, name: str, writer: Callable[[Path], object]) -> bool:
        """Write a file by ``writer(path)``; return False if that fails."""
        try:
            writer(self.folder / name)
        except Exception as error:  # from the disk, or from drawing
            say(f"{self.folder / name} could not be written: {error}")
            self.failed = True
            return False
        self.written.append(name)
        return True

    def clear(self) -> None:
        """Remove files of an earlier run that this run did not write."""
        for name in _FILES:
            path = self.folder / name
            if name not in self.written and path.is_file():
                path.unlink()


def _figures(comparison: Comparison, fits: list[Fit], data: Dataset) -> dict[str, Figure]:
    try:
        scaled = " (standardized)" if data.x_mean else ""
        known = data.task != "count"  # whose function is the log of a rate
        return comparison.figures(
            target=data.target_name if known else f"log rate of {data.target_name}",
            features=[f"{name}{scaled}" for name in data.feature_names],
            train=(data.x_train, data.y_train * data.y_sd + data.y_mean) if known else None,
            posteriors={f.name: f.posterior for f in fits if f.name in comparison.evaluations},
            points=_point_names(comparison, data),
            scales={} if data.y_sd == 1 else {"noise": data.y_sd},
        )
    except Exception as error:  # the table must not be lost because of a figure
        say(f"there are no figures: {type(error).__name__}: {error}")
        return {}


def _write(
    comparison: Comparison,
    figures: dict[str, Figure],
    files: _Files,
    data: Dataset,
    about: str,
    settings: dict[str, dict[str, object]],
    validated: Further | None,
) -> None:
    """Write the table, the figures, the report and its numbers."""
    files.write(_TABLE, comparison.to_csv)

    def draw(figure: Figure) -> Callable[[Path], None]:
        def draw_to(path: Path) -> None:
            with atomic_write(path) as part:
                figure.savefig(part, dpi=200)

        return draw_to

    drawn = {
        name: figure for name, figure in figures.items() if files.write(f"{name}.png", draw(figure))
    }
    files.write(
        _REPORT,
        lambda path: write_page(
            comparison,
            path,
            drawn,
            title=f"Posteriors of a neural network for {data.target_name}",
            about=about,
            notes=[_units(data)],
            settings=settings,
            points=_points(comparison, data),
            further=[] if validated is None else [validated],
        ),
    )
    numbers = comparison.to_json() | {
        "about": about,
        "units": _units(data),
        "points": [data.point(place) | {"place": place} for place in comparison.places],
        "settings": settings,
        "cross_validation": None if validated is None else list(validated.rows),
    }

    def save(path: Path) -> None:
        with atomic_write(path) as part:
            part.write_text(json.dumps(numbers, indent=1, default=str), encoding="utf-8")

    files.write(_NUMBERS, save)


def _point_names(comparison: Comparison, data: Dataset) -> list[str]:
    """A name for each kept test point: its row in the source, its place in simulated data, and its
    target."""
    return [_point_name(data.point(place), place) for place in comparison.places]


def _point_name(point: dict[str, Any], place: int) -> str:
    target = point["target"]
    shown = target if isinstance(target, str) else f"{target:.3g}"
    where = f"point {place}" if point["row"] is None else f"row {point['row']}"
    return f"{where}, target {shown}"


def _points(comparison: Comparison, data: Dataset) -> dict[str, str]:
    """The inputs of the test points in the figures, by their names."""
    found = {}
    for place in comparison.shown_points():
        point = data.point(comparison.places[place])
        values = ", ".join(f"{name} {value:.4g}" for name, value in point["inputs"].items())
        found[_point_name(point, comparison.places[place])] = values
    return found


def _keep(fits: list[Fit], files: _Files) -> str:
    """Write the results of fits that were not compared, with the draws of Markov chains; return the
    table as text."""
    known = [
        {
            "posterior": fit.name,
            "seconds": fit.seconds,
            "elbo": fit.elbo,
            "log_evidence": fit.log_evidence,
        }
        for fit in fits
    ]
    shown = [column for column in columns("regression", None) if column.key in known[0]]
    files.write(_TABLE, lambda path: to_csv(path, known, shown))
    for fit in fits:
        if isinstance(fit.posterior, Samples):
            files.write(f"{fit.name}.safetensors", fit.posterior.save)
    return to_text(known, shown)


def _units(data: Dataset) -> str:
    if data.task == "classification":
        return "NLPD and ELBO are in nats; distances are between class probabilities."
    if data.task == "count":
        return (
            f"RMSE and CRPS are in units of {data.target_name}; distances are between the logs of "
            "the rates; NLPD and ELBO are in nats."
        )
    return (
        f"RMSE, CRPS and distances are in units of {data.target_name}; NLPD is in nats for them, "
        f"ELBO in nats for the standardized training targets."
    )


# ------------------------------------------------------------------------------ input and output


def _shown_once() -> Callable[..., None]:
    """Show each warning of this package once; others go to the logger as debug messages."""
    seen = set()

    def show(
        message: Warning | str, category: type[Warning], *args: object, **more: object
    ) -> None:
        text = str(message)
        if not issubclass(category, BdlWarning):
            logger.debug("%s: %s", category.__name__, text)
        elif text not in seen:
            seen.add(text)
            say(f"warning: {text}")

    return show

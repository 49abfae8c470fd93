"""``pyro-bdl compare``: data, fits, comparison, files."""

import itertools
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from pyro_bdl import posteriors
from pyro_bdl.app import cross_validation
from pyro_bdl.app.figures import CAPTIONS, shown_points
from pyro_bdl.app.finished import Finished, identity
from pyro_bdl.app.options import Options
from pyro_bdl.app.page import write_page
from pyro_bdl.app.provenance import provenance
from pyro_bdl.app.report import Table
from pyro_bdl.comparison.costs import COSTS, Costs
from pyro_bdl.comparison.evaluate import Evaluation, evaluate
from pyro_bdl.comparison.judge import criteria
from pyro_bdl.comparison.metric import of_task
from pyro_bdl.comparison.scores import TEST_DATA
from pyro_bdl.comparison.table import Comparison, compare_evaluations
from pyro_bdl.data.dataset import Dataset
from pyro_bdl.data.programs import check_memory, program
from pyro_bdl.errors import ArgumentError, FailedStepError, MissingOperatorError
from pyro_bdl.posteriors import Fit, Problem
from pyro_bdl.utils.files import atomic_write
from pyro_bdl.utils.progress import hidden, logger
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.tables import to_text

FAILED, INTERRUPTED = 1, 130
_NO_MEMORY = (MemoryError, torch.OutOfMemoryError)
# Errors that say what is wrong with program, data or options; others show their traceback.
_EXPLAINED = (
    ValueError,
    ArgumentError,
    MissingOperatorError,
    FailedStepError,
    torch.linalg.LinAlgError,
    *_NO_MEMORY,
)
_REFERENCE, _SHIPPED = "nuts", "reference"
_FILES = ("table.csv", "report.html", "report.json", *(f"{name}.png" for name in CAPTIONS))
_SCORES = ("rmse", "accuracy", "nlpd", "crps", "coverage")
_WIDTH = 100  # of output that is not a terminal
# Below this many numbers a step is not faster on several threads. On busy cores it is many times
# slower, since the threads wait for each other.
_WORTH_THREADS = 2**19
_LEGEND = (
    "The report says below its table what each column means, and table.csv holds more of them "
    "(--details)."
)


class BadInput(Exception):
    """Invalid options or data; the message says why and what to do."""


def run(options: Options, line: str) -> int:
    """Fit, compare and write; return the exit code.

    :param line: the command line, for the report.
    :raises BadInput: for options and data that are refused.
    """
    try:
        options, reference = options.with_reference()
        data = options.load() if reference is None else reference.dataset
        data = data.to(options.device)
        options.check(data)
        check_memory(data, options.hidden)
        _check_folder(options.out)
    except (ValueError, OSError) as error:
        raise BadInput(str(error)) from error
    about = _about(data, options)
    if not options.quiet:
        print("\n".join([about, *data.notes]), flush=True)
    numbers = len(data.x_train) * max(options.hidden)
    with seeded(options.seed), limited_threads(numbers):
        fitter = Fitter(options, data)
        fitter.fit_all()
        evaluations, failed = fitter.evaluations, fitter.failed
        if not evaluations:
            return FAILED if fitter.failures else INTERRUPTED
        base = _REFERENCE if _REFERENCE in evaluations else None
        if reference is not None:
            base = _SHIPPED
            evaluations[base] = fitter.evaluated(reference.draws().to(options.device))
        comparison = compare_evaluations(evaluations, base, left_out=fitter.failures)
        made = provenance(line, options, data, fitter.words, fitter.fits)
        validated = _validated(options)
        written, complete = _write(
            comparison, fitter.fits, options.out, data, about, made, validated
        )
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    if options.quiet:
        print(textwrap.fill(comparison.summary, width, break_on_hyphens=False))
    else:
        print(f"\n{comparison.to_text(width, details=options.details)}\n")
        print(textwrap.fill(f"{_units(data)} {_LEGEND}", width))
    print(f"Written to {options.out}: {', '.join(written)}")
    return 0 if complete and not failed else FAILED


def _about(data: Dataset, options: Options) -> str:
    features = data.x_train.shape[1]
    return (
        f"{data.target_name}: {data.task}"
        + (f" into {len(data.class_names)} classes" if data.class_names else "")
        + f", {features} feature{'s' * (features > 1)}, {len(data.x_train)} training and "
        f"{len(data.x_test)} test rows; {','.join(map(str, options.hidden))} hidden units "
        f"({options.activation})"
        + (f", {options.noise} noise" if options.noise != "normal" else "")
    )


def _check_folder(folder: Path) -> None:
    """Make the folder of the results, and check that files can be written to it.

    :raises ValueError: if not, or if one of the files is a folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".pyro-bdl"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--out: cannot write to '{folder}': {error.strerror}") from error
    for file in _FILES:
        if (folder / file).is_dir():
            raise ValueError(
                f"--out: '{folder / file}' is a folder, but a file of that name is to be written: "
                "remove it, or name another folder"
            )


@contextmanager
def limited_threads(numbers: int) -> Iterator[None]:
    """One thread of torch for steps with few numbers, the usual number for others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if numbers < _WORTH_THREADS else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ----------------------------------------------------------------------------------------- fits


class Fitter:
    """The posteriors of one data set, fitted one after another and kept as they are finished.

    ``failures`` are the reasons of those that are not there, and ``failed`` tells whether one of
    these is an error.
    """

    def __init__(self, options: Options, data: Dataset) -> None:
        self.options, self.data = options, data
        self.fits: list[Fit] = []
        self.evaluations: dict[str, Evaluation] = {}
        self.failures: dict[str, str] = {}
        self.failed = self.interrupted = False
        model, self.words = program(
            data,
            options.hidden,
            options.activation,
            noise=options.noise,
            gain=options.gain(),
        )
        self.problem = Problem(model.to(options.device), data.x_train, data.y_train)
        run = identity(data, self.words, options.settings())
        self.finished = Finished(options.out, run, fresh=options.fresh)

    def fit_all(self, *, shown: bool = True) -> None:
        """Fit and evaluate all posteriors; Ctrl-C ends it, a failure does not.

        :param shown: print a line for each posterior.
        """
        names = self.options.names()
        finished = [name for name in names if name in self.finished]
        if finished and shown:
            logger.warning(
                "goes on from %s, where %s finished; --fresh fits anew",
                self.finished.folder,
                ", ".join(finished) + (" is" if len(finished) == 1 else " are"),
            )
        table = _ProgressTable(self.data, names, shown=shown and not self.options.quiet)
        for name in names:
            note = "finished before" if name in self.finished else ""
            try:
                fit = self.finished.load(name, self.problem) or self._fit(name)
                self.evaluations[name] = self._evaluation(fit)
                self.fits.append(fit)
                table.add(name, self.evaluations[name].scores, note)
                self.interrupted = fit.interrupted
            except KeyboardInterrupt:
                self.interrupted = True
            except _EXPLAINED as error:
                self.failures[name] = f"left out: {error}"
                self.failed |= not isinstance(error, _NO_MEMORY)  # too large for this machine
                logger.warning("%s is %s", name, self.failures[name])
                table.add(name, {}, self.failures[name])
            if self.interrupted:
                done = {*self.evaluations, *self.failures}
                left = ", ".join(name for name in names if name not in done)
                logger.warning("interrupted; not fitted: %s", left or "none")
                break

    def _fit(self, name: str) -> Fit:
        fit = posteriors.fit(name, self.problem, self.options.settings(), progress=self.bars)
        if not fit.interrupted:
            self.finished.save(fit)
        return fit

    def _evaluation(self, fit: Fit) -> Evaluation:
        device = self.data.y_test.device
        found = self.finished.load_evaluation(fit.name, device)
        if found is None:
            found = self.evaluated(fit.posterior, fit.costs)
            if not fit.interrupted:
                self.finished.save_evaluation(fit.name, found)
        return found

    def evaluated(self, posterior: Any, costs: Costs | None = None) -> Evaluation:
        """A posterior on the test part, in the units of the target."""
        data = self.data
        return evaluate(
            self.problem.model,
            posterior,
            data.x_test,
            data.y_test,
            train=(data.x_train, data.y_train),
            costs=costs,
            units=(data.y_sd, data.y_mean),
            seed=self.options.seed,
            progress=self.bars,
        )

    @property
    def bars(self) -> bool:
        """True if progress bars are shown."""
        return not (self.options.quiet or hidden(None))


class _ProgressTable:
    """A line of costs and scores for each posterior as it is finished."""

    def __init__(self, data: Dataset, names: Sequence[str], *, shown: bool) -> None:
        task = {"count": "regression"}.get(data.task, data.task)
        scores = [metric for metric in of_task(TEST_DATA, task) if metric.key in _SCORES]
        self.columns = [metric.column() for metric in (*COSTS, *scores)]
        self.width, self.shown = max(map(len, names)), shown
        if shown:
            self._print("", [column.title for column in self.columns], "")

    def add(self, name: str, row: Mapping[str, Any], note: str) -> None:
        """Print a row."""
        if self.shown:
            self._print(name, [column.cell(row) for column in self.columns] if row else [], note)

    def _print(self, name: str, cells: Sequence[str], note: str) -> None:
        widths = [max(len(column.title), 13 if column.error else 8) for column in self.columns]
        padded = [text.rjust(width) for text, width in zip(cells, widths, strict=False)]
        line = "  ".join([f"  {name.ljust(self.width)}", *padded, note])
        print(line.rstrip(), flush=True)


def _validated(options: Options) -> Table | None:
    """The table of scores over splits, if ``--folds`` asks for it."""
    folds, names = options.folds, options.names()
    found: list[Mapping[str, Any]] = []
    if folds is None:
        return None
    for repeat, fold in itertools.product(range(options.repeats), range(folds)):
        split = options.load((fold, folds), repeat).to(options.device)
        fitter = Fitter(options, split)
        fitter.fit_all(shown=False)
        if fitter.interrupted:
            logger.warning("interrupted: %s splits were scored", len(found))
            break
        found.append({name: made.scores for name, made in fitter.evaluations.items()})
    if len(found) < 2:
        return None
    rows, shown = cross_validation.summarized(found, names, _REFERENCE, folds)
    if not options.quiet:
        print(f"\nOver {len(found)} splits:\n\n{to_text(rows, shown)}")
    title = f"Scores over {len(found)} splits"
    return Table(title, rows, shown, note=cross_validation.NOTE)


# -------------------------------------------------------------------------------------- results


def _figures(comparison: Comparison, fits: Sequence[Fit], data: Dataset) -> dict[str, Figure]:
    scaled = " (standardized)" if data.x_mean else ""
    known = data.task != "count"  # whose function is the log of a rate
    return comparison.figures(
        target=data.target_name if known else f"log rate of {data.target_name}",
        features=[f"{name}{scaled}" for name in data.feature_names],
        train=(data.x_train, data.y_train * data.y_sd + data.y_mean) if known else None,
        posteriors={f.name: f.posterior for f in fits if f.name in comparison.evaluations},
        points=[_point_name(data.point(p), p) for p in comparison.first.places.tolist()],
        scales={} if data.y_sd == 1 else {"noise": data.y_sd},
    )


def _write(
    comparison: Comparison,
    fits: Sequence[Fit],
    folder: Path,
    data: Dataset,
    about: str,
    settings: dict[str, dict[str, object]],
    validated: Table | None,
) -> tuple[list[str], bool]:
    """Write table, figures, report and its numbers; return the written files, and if these are all.

    A file that the disk does not take is said and loses no other one. Files of an earlier run that
    this one has not written are removed.
    """
    written: list[str] = []
    complete = True
    places = comparison.first.places.tolist()

    def write(name: str, writer: Callable[[Path], object]) -> None:
        nonlocal complete
        try:
            writer(folder / name)
            written.append(name)
        except OSError as error:
            complete = False
            logger.warning("%s could not be written: %s", folder / name, error)

    def draw(figure: Figure) -> Callable[[Path], None]:
        def draw_to(path: Path) -> None:
            with atomic_write(path) as part:
                figure.savefig(part, dpi=200)

        return draw_to

    def table(path: Path) -> None:
        with atomic_write(path) as part:
            comparison.table.to_csv(part)

    def save(path: Path) -> None:
        numbers = _numbers(comparison) | {
            "about": about,
            "units": _units(data),
            "points": [data.point(place) | {"place": place} for place in places],
            "settings": settings,
            "cross_validation": None if validated is None else validated.rows,
        }
        with atomic_write(path) as part:
            part.write_text(json.dumps(numbers, indent=1, default=str), encoding="utf-8")

    write("table.csv", table)
    figures = _figures(comparison, fits, data)
    for name, figure in figures.items():
        write(f"{name}.png", draw(figure))
    write(
        "report.html",
        lambda path: write_page(
            comparison,
            path,
            figures,
            title=f"Posteriors of a neural network for {data.target_name}",
            about=about,
            notes=[_units(data)],
            settings=settings,
            points=_points(comparison, data),
            further=[] if validated is None else [validated],
        ),
    )
    write("report.json", save)
    for name in set(_FILES) - set(written):
        (folder / name).unlink(missing_ok=True)
    return written, complete


def _numbers(comparison: Comparison) -> dict[str, Any]:
    """All numbers and words of a comparison in JSON types."""
    table = comparison.table.astype(object)
    return {
        "task": comparison.task,
        "reference": comparison.reference,
        "summary": comparison.summary,
        "warnings": list(comparison.warnings),
        "ranked by": criteria(comparison.reference),
        "columns": [
            {name: getattr(column, name) for name in ("key", "title", "group", "help")}
            for column in (*table.attrs["columns"], *table.attrs["details"])
        ],
        "posteriors": table.where(table.notna(), None).to_dict("index"),
    }


def _point_name(point: dict[str, Any], place: int) -> str:
    """A test point's row in the source, or place in simulated data, and its target."""
    target = point["target"]
    shown = target if isinstance(target, str) else f"{target:.3g}"
    where = f"point {place}" if point["row"] is None else f"row {point['row']}"
    return f"{where}, target {shown}"


def _points(comparison: Comparison, data: Dataset) -> dict[str, str]:
    """The inputs of the test points in the figures, by their names."""
    found = {}
    for place in comparison.first.places[shown_points(comparison)].tolist():
        point = data.point(place)
        values = ", ".join(f"{name} {value:.4g}" for name, value in point["inputs"].items())
        found[_point_name(point, place)] = values
    return found


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

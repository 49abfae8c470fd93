"""``pyro-bdl compare``: data, fits, comparison, files."""

import itertools
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pyro_bdl import references
from pyro_bdl.app import baselines, cross_validation
from pyro_bdl.app.ahead import Ahead, Split
from pyro_bdl.app.fits import Fits
from pyro_bdl.app.options import Options
from pyro_bdl.app.provenance import provenance
from pyro_bdl.comparison.columns import to_text
from pyro_bdl.comparison.report.page import units, write_page
from pyro_bdl.comparison.report.write import Table
from pyro_bdl.comparison.table import Comparison, compare_evaluations
from pyro_bdl.utils.files import atomic_write
from pyro_bdl.utils.progress import logger
from pyro_bdl.utils.random_state import seeded

FAILED, INTERRUPTED = 1, 130
_REFERENCE, _SHIPPED = "nuts", "reference"
_FILES = ("table.csv", "report.html", "report.json")
_WIDTH = 100  # of output that is not a terminal
# Below this many numbers a step is not faster on several threads. On busy cores it is many times
# slower, since the threads wait for each other.
_WORTH_THREADS = 2**19


class BadInput(Exception):
    """Invalid options or data; the message says why and what to do."""


def run(options: Options, line: str) -> int:
    """Fit, compare and write; return the exit code.

    :param line: the command line, for the report.
    :raises BadInput: for options and data that are refused.
    """
    try:
        data = options.load()
        if options.folds is not None:
            options.load(fold=(0, options.folds))
        fits = Fits(options, data, shown=not options.quiet)
    except (ValueError, OSError) as error:
        raise BadInput(str(error)) from error
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    if not options.quiet:
        print(
            "\n".join(textwrap.fill(text, width) for text in [_about(fits), *data.notes]),
            flush=True,
        )
    places = list(itertools.product(range(options.repeats), range(options.folds or 0)))
    with (
        seeded(options.seed),
        limited_threads(len(data.x_train) * max(options.hidden or (50,))),
        Ahead(options, fits.unfinished(), places) as ahead,
    ):
        fits.fit_all(ahead.names, ahead.wait)
        evaluations = dict(fits.evaluations)
        if not evaluations:
            return FAILED if fits.left_out else INTERRUPTED
        base = _REFERENCE if _REFERENCE in evaluations else None
        if options.reference is not None:
            base = _SHIPPED
            draws = references.load(options.reference).draws()
            evaluations[base] = fits.evaluated(draws.to(options.device))
        comparison = compare_evaluations(
            evaluations, base, left_out=fits.left_out,
            baselines={
                name: (evaluation, baselines.in_words(name, data.task))
                for name, evaluation in fits.baselines.items()
            },
        )  # fmt: skip
        splits = _splits(options, places, ahead)
        written = _write(comparison, fits, line, splits)
    if options.quiet:
        print(textwrap.fill(comparison.summary, width, break_on_hyphens=False))
    else:
        legend = "The report says what each column means, and table.csv holds more (--details)."
        print(f"\n{comparison.to_text(width, details=options.details)}\n")
        print(textwrap.fill(f"{units(data)} {legend}", width))
    print(f"Written to {options.out}: {', '.join(written)}")
    return 0 if len(written) == len(_FILES) and not fits.failed else FAILED


def _about(fits: Fits) -> str:
    data, count = fits.data, fits.data.x_train.shape[1]
    classes = f" into {len(data.class_names)} classes" if data.class_names else ""
    return (
        f"{data.target_name}: {data.task}{classes}, {count} feature{'s' * (count > 1)}, "
        f"{len(data.x_train)} training and {len(data.x_test)} test rows; "
        f"{fits.words['network']}; {fits.words['likelihood']}"
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


def _splits(options: Options, places: list[Split], ahead: Ahead) -> Table | None:
    """The table of scores over splits, if ``--folds`` asks for it."""
    splits: list[Mapping[str, Any]] = []
    folds = options.folds
    if folds is None:
        return None
    for place in places:
        repeat, fold = place
        try:
            if place in ahead.splits:
                ahead.wait(place)
            fresh = options.fresh and place not in ahead.splits
            fits = Fits(
                replace(options, fresh=fresh), options.load((fold, folds), repeat), shown=False
            )
            fits.fit_all()
            interrupted = fits.interrupted
        except KeyboardInterrupt:
            interrupted = True
        if interrupted:
            logger.warning("interrupted: %s splits were scored", len(splits))
            break
        scored = {**fits.evaluations, **fits.baselines}
        splits.append({name: made.scores for name, made in scored.items()})
    if len(splits) < 2:
        return None
    rows, columns = cross_validation.summarized(splits, _REFERENCE, folds)
    title = f"Scores over {len(splits)} splits"
    if not options.quiet:
        print(f"\n{title}:\n\n{to_text(rows, columns)}")
    return Table(title, rows, columns, note=cross_validation.NOTE)


def _write(comparison: Comparison, fits: Fits, line: str, splits: Table | None) -> list[str]:
    """Write table, report and all numbers; return the names of the written files.

    A file that the disk does not take is said and loses no other one.
    """
    data, about, settings = fits.data, _about(fits), provenance(line, fits)
    posteriors = {name: fit.posterior for name, fit in fits.fits.items()}
    table = comparison.table.astype(object)
    numbers = {
        "about": about,
        "reference": comparison.reference,
        "summary": comparison.summary,
        "warnings": comparison.warnings,
        "posteriors": table.where(table.notna(), None).to_dict("index"),
        "units": units(data),
        "points": [{**data.point(i), "place": i} for i in comparison.first.places.tolist()],
        "settings": settings,
        "cross_validation": None if splits is None else splits.rows,
    }
    text = json.dumps(numbers, indent=1, default=str)
    page = partial(
        write_page, comparison, data=data, about=about, settings=settings,
        figures=comparison.figures(data=data, posteriors=posteriors),
        further=[] if splits is None else [splits],
    )  # fmt: skip
    writers: tuple[Callable[[Path], Any], ...]
    writers = (comparison.table.to_csv, page, lambda path: path.write_text(text, encoding="utf-8"))
    written = []
    for name, write in zip(_FILES, writers, strict=True):
        path = fits.options.out / name
        try:
            with atomic_write(path) as part:
                write(part)
            written.append(name)
        except OSError as error:
            logger.warning("%s could not be written: %s", path, error)
    return written

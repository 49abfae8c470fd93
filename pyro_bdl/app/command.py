"""The command line: parsing, messages on stderr, exit codes."""

import gc
import inspect
import io
import logging
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from typer.exceptions import TyperException

from pyro_bdl import posteriors
from pyro_bdl.app import run
from pyro_bdl.app.ahead import keep_compiled
from pyro_bdl.app.options import Options
from pyro_bdl.data.examples import EXAMPLES
from pyro_bdl.errors import BdlWarning
from pyro_bdl.utils.progress import logger
from pyro_bdl.version import __version__

BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: success. 1: a posterior could not be fitted or scored, or a file could not be written; all
    other results are there. 2: bad input, with one sentence on stderr. 130: Ctrl-C before all
    results were shown.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    with messages(), warnings.catch_warnings():
        warnings.simplefilter("always", BdlWarning)
        warnings.showwarning = shown_once()
        command = typer.main.get_command(_app(shlex.join(["pyro-bdl", *given])))
        try:
            return int(command.main(given, prog_name="pyro-bdl", standalone_mode=False) or 0)
        except TyperException as error:
            words = error.format_message()
            if "extra argument" in words:
                words = f"{words}: each value has an option, such as --data FILE"
            return _refused(f"{words}; see pyro-bdl compare --help")
        except run.BadInput as error:
            return _refused(str(error))


def script() -> NoReturn:
    """Run the command as a process, which a closed pipe, or a Ctrl-C while it exits, ends without a
    traceback. What closed streams are told is lost; characters that a stream's encoding lacks are
    replaced."""
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    keep_compiled()
    gc.freeze()  # what the imports made stays: collections before each fit need not walk it
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


def _refused(sentence: str) -> int:
    logger.warning(" ".join(sentence.split()))
    return BAD_INPUT


def _app(line: str) -> typer.Typer:
    """The commands.

    :param line: the command line, for the report.
    """
    app = typer.Typer(
        add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
    )

    def compare(**options: Any) -> int:
        """Fit several posteriors of a Bayesian neural network to a table of data, run NUTS on the
        same program as the reference, print the answer and one table, and write them with figures
        and a report. By default on a built-in problem."""
        chosen = Options(**options)
        try:
            return run.run(chosen, line)
        except KeyboardInterrupt:
            logger.warning("interrupted")
            return run.INTERRUPTED

    # The options are the fields of one dataclass, which everything below takes as a value.
    compare.__signature__ = inspect.signature(Options)  # type: ignore[attr-defined]
    app.command("compare", epilog=_epilog())(compare)

    @app.callback()
    def _top(
        version: Annotated[
            bool, typer.Option("--version", is_eager=True, callback=_version, help="Print it.")
        ] = False,
    ) -> None:
        """Bayesian deep learning on Pyro programs."""

    return app


def _version(asked: bool) -> None:
    if asked:
        print(f"pyro-bdl {__version__}")
        raise typer.Exit


def _epilog() -> str:
    problems = [f"- {name}: {example.description}" for name, example in EXAMPLES.items()]
    fits = [
        f"- {entry.name}{' *' if entry.default else ''}: {entry.description}"
        for entry in posteriors.entries()
    ]
    text = (
        "Ctrl-C ends the current fit, and shows the table for the posteriors so far. Finished "
        "posteriors are kept: the same command then fits only what is missing."
    )
    return "\n\n".join(
        ["Built-in problems:", "\n".join(problems), "Posteriors:", "\n".join(fits), text]
    )


@contextmanager
def messages() -> Iterator[None]:
    """Print the logger's messages, from INFO on, as lines of ``pyro-bdl`` on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("pyro-bdl: %(message)s"))
    handler.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def shown_once() -> Callable[..., None]:
    """Show each warning of this package once; others go to the logger as debug messages."""
    seen = set()

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        text = str(message)
        if not issubclass(category, BdlWarning):
            logger.debug("%s: %s", category.__name__, text)
        elif text not in seen:
            seen.add(text)
            logger.warning("warning: %s", text)

    return show

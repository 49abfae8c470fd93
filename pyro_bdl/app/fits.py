"""The posteriors of one data set, fitted one after another and kept in a folder as they finish."""

import json
import shutil
import time
import zlib
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError

from pyro_bdl import posteriors
from pyro_bdl.app import baselines
from pyro_bdl.app.cross_validation import SCORES
from pyro_bdl.app.options import Options
from pyro_bdl.comparison.costs import Costs
from pyro_bdl.comparison.evaluate import DRAWS, Evaluation, evaluate_in
from pyro_bdl.comparison.setting import Setting
from pyro_bdl.data.dataset import Dataset
from pyro_bdl.errors import ArgumentError, FailedStepError, MissingOperatorError
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.saved import load_posterior
from pyro_bdl.posteriors import Fit, Problem
from pyro_bdl.program.samples import Samples
from pyro_bdl.utils.files import atomic_write
from pyro_bdl.utils.progress import is_silent, logger
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.version import __version__

T = TypeVar("T")
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


class Fits:
    """The posteriors of one data set, and their scores on its test part.

    They are kept in ``posteriors/CHECKSUM`` of the folder of results, the checksum being that of
    data, program and settings: a fit is the file of its posterior and, written last, ``NAME.json``
    with its costs; ``NAME.evaluation`` has its scores. A crash at any moment leaves what is
    finished, and the same command goes on from it.

    ``left_out`` has the reasons of those that are not there, ``failed`` tells whether one of these
    is an error, ``interrupted`` whether Ctrl-C ended the fits. ``baselines`` are fitted anew each
    time.

    :param shown: print a line for each posterior.
    :raises OSError: if the folder cannot be written to.
    :raises ValueError: for a program that does not fit the data.
    """

    def __init__(self, options: Options, data: Dataset, *, shown: bool) -> None:
        self.options, self.data, self.shown = options, data, shown
        self.names = options.names()
        with seeded(options.seed):  # of the network's first weights
            model, self.words = options.program(data)
        self.problem = Problem(model, data.x_train, data.y_train, options.settings())
        self.fits: dict[str, Fit] = {}
        self.evaluations: dict[str, Evaluation] = {}
        self.baselines: dict[str, Evaluation] = {}
        self.left_out: dict[str, str] = {}
        self._settings: list[Setting] = []  # one for each program
        self.failed = self.interrupted = False
        tensors = (data.x_train, data.y_train, data.x_test, data.y_test)
        numbers = b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors)
        run = {
            "version of pyro_bdl": __version__,
            "data": f"{data!r}, checksum {zlib.crc32(numbers):08x}",
            **self.words,
            **asdict(options.settings()),
        }
        text = json.dumps(run, indent=1)
        self.folder = options.out / "posteriors" / f"{zlib.crc32(text.encode()):08x}"
        if options.fresh:
            shutil.rmtree(self.folder, ignore_errors=True)
        with atomic_write(self.folder / "run.json") as part:
            part.write_text(text, encoding="utf-8")

    def unfinished(self) -> list[str]:
        """The posteriors that are not in the folder."""
        return [name for name in self.names if not (self.folder / f"{name}.json").exists()]

    def fit_all(
        self, elsewhere: Collection[str] = (), wait: Callable[[], None] = lambda: None
    ) -> None:
        """Fit and evaluate all posteriors; Ctrl-C ends it, a failure does not.

        :param elsewhere: posteriors that another process fits into the folder meanwhile, which come
            last.
        :param wait: waits for them.
        """
        unfinished = {*self.unfinished(), *elsewhere}
        finished = [name for name in self.names if name not in unfinished]
        if finished and self.shown:
            logger.warning(
                "goes on from %s, where %s finished; --fresh fits anew",
                self.folder,
                ", ".join(finished) + (" is" if len(finished) == 1 else " are"),
            )
        for name in sorted(self.names, key=elsewhere.__contains__):
            try:
                if name in elsewhere:
                    wait()
                fit = self._load(name) or self._fit(name)
                evaluation = self._evaluation(fit)
                self.fits[name], self.evaluations[name] = fit, evaluation
                self._say(name, evaluation, fit.costs, finished=name in finished)
                self.interrupted = fit.interrupted
            except KeyboardInterrupt:
                self.interrupted = True
            except _EXPLAINED as error:
                self.left_out[name] = f"left out: {error}"
                self.failed |= not isinstance(error, _NO_MEMORY)  # too large for this machine
                logger.warning("%s is %s", name, self.left_out[name])
            if self.interrupted:
                done = {*self.evaluations, *self.left_out}
                left = ", ".join(name for name in self.names if name not in done)
                logger.warning("interrupted; not fitted: %s", left or "none")
                break
        self.fits = self._in_order(self.fits)
        self.evaluations = self._in_order(self.evaluations)
        self.left_out = self._in_order(self.left_out)
        if self.options.baselines and not self.interrupted:
            self._fit_baselines()

    def _in_order(self, of: dict[str, T]) -> dict[str, T]:
        return {name: of[name] for name in self.names if name in of}

    def _fit_baselines(self) -> None:
        """Fit and score the baselines; none of them loses a posterior."""
        for name in baselines.NAMES:
            try:
                started = time.perf_counter()
                draws = baselines.predictions(name, self.data, self.options.seed)
                costs = Costs(time.perf_counter() - started)
                evaluation = self.evaluated(draws.to(self.data.y_test.device), costs)
                self.baselines[name] = evaluation
                self._say(name, evaluation, costs)
            except KeyboardInterrupt:
                self.interrupted = True
                logger.warning("interrupted; the baselines from %s on are not there", name)
                break
            except (*_EXPLAINED, RuntimeError) as error:
                logger.warning("%s is left out: %s", name, error)

    def evaluated(self, posterior: Any, costs: Costs | None = None) -> Evaluation:
        """A posterior on the test part, under its own program (a prior by the evidence is one), in
        the units of the target."""
        model: Any = self.problem.model
        if isinstance(posterior, Guide):
            model = posterior.program_model
        setting = next((known for known in self._settings if known.model is model), None)
        if setting is None:
            data = self.data
            setting = Setting.read(
                model, posterior, test=(data.x_test, data.y_test),
                train=(data.x_train, data.y_train), ood=None, units=(data.y_sd, data.y_mean),
                num_samples=DRAWS, batch_norm_data=None, seed=self.options.seed,
                progress=self._bars,
            )  # fmt: skip
            self._settings.append(setting)
        return evaluate_in(setting, posterior, costs or Costs(), None)

    @property
    def _bars(self) -> bool:
        return not (self.options.quiet or is_silent(None))

    def _say(
        self, name: str, evaluation: Evaluation, costs: Costs, *, finished: bool = False
    ) -> None:
        """A line of time and scores."""
        if self.shown:
            scores = evaluation.scores
            cells = [f"{c.title} {c.cell(scores)}" for c in SCORES if c.key in scores]
            spent = f"{costs.seconds:.1f} s" + (" before" if finished else "")
            names = (*self.names, *(baselines.NAMES if self.options.baselines else ()))
            width = max(map(len, names))
            print(f"  {name.ljust(width)}  {', '.join([spent, *cells])}", flush=True)

    def _fit(self, name: str) -> Fit:
        fit = posteriors.fit(name, self.problem, progress=self._bars)
        if not fit.interrupted:
            try:
                fit.posterior.save(self.folder / f"{name}.safetensors")
                content = asdict(replace(fit, posterior=None, settings=dict(fit.settings)))
                with atomic_write(self.folder / f"{name}.json") as part:
                    part.write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
            except (OSError, SafetensorError) as error:
                logger.warning("%s could not be kept in %s: %s", name, self.folder, error)
        return fit

    def _load(self, name: str) -> Fit | None:
        """A finished fit; None without one or, with a message, for damaged files."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            fit = Fit(**{**content, "costs": Costs(**content["costs"])})
            program = posteriors.get(name).program(self.problem)
            posterior = load_posterior(path.with_suffix(".safetensors"), program)
        except (ValueError, TypeError, KeyError, OSError, SafetensorError) as error:
            logger.warning("%s is fitted again: the finished one is damaged (%s)", name, error)
            return None
        if isinstance(posterior, Samples):
            posterior = posterior.to(self.problem.x.device)
        return replace(fit, posterior=posterior)

    def _evaluation(self, fit: Fit) -> Evaluation:
        path = self.folder / f"{fit.name}.evaluation"
        if not fit.interrupted and path.exists():
            try:
                return Evaluation.load(path).to(self.data.y_test.device)
            except (ValueError, OSError) as error:
                logger.warning("%s is scored again: %s", fit.name, error)
        evaluation = self.evaluated(fit.posterior, fit.costs)
        if not fit.interrupted:
            try:
                evaluation.save(path)
            except (OSError, SafetensorError) as error:
                logger.warning("the scores of %s could not be kept: %s", fit.name, error)
        return evaluation

"""A posterior fitted to several data sets, such as folds, whose trainings run at once."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.posteriors.registry import Entry, Fit, Options, Problem, Result, fit, get, with_bounds
from pyro_bdl.training.descent import Training, rows_per_step
from pyro_bdl.training.parallel_guides import OnOwnData
from pyro_bdl.training.put_off import Asked
from pyro_bdl.utils.progress import hidden
from pyro_bdl.utils.random_state import process_seeded

# The arguments of ``training.train`` that trainings at once know too.
_KNOWN = {
    "steps", "learning_rate", "temperature", "num_particles", "estimator", "batch_size",
    "parameters",
}  # fmt: skip


def fit_together(
    name: str,
    problems: Sequence[Problem],
    options: Options | None = None,
    *,
    progress: bool = False,
) -> list[Fit]:
    """Fit a registered posterior to each of several data sets of one program.

    The trainings by SVI that its fits ask for are done for all data sets at once, by ``vmap``, with
    each program's own prior scales; what follows them, such as the curvature of a Laplace
    approximation, is done for one after another. Data sets are fitted one after another where the
    training is another one: chains (``nuts``), the evidence of a last layer, in closed form, and
    natural gradients (``ivon``, ``noisy-kfac``), whose optimizers hold one guide. So are programs
    with parameters that are trained along with the guide.

    :param problems: programs alike, each for its data.
    :returns: the fits; ``seconds`` holds an equal share of the common trainings.
    :raises KeyboardInterrupt: for Ctrl-C, which keeps nothing.
    :raises ValueError: for a name that is not registered, or from the posterior's function.
    """
    options, entry = options or Options(), get(name)
    fits = [_Fit(entry, problem, options, progress) for problem in problems]
    for each in fits:
        each.go_on()
    while waiting := [each for each in fits if each.asked is not None]:
        started = time.perf_counter()
        runs = _train(waiting, options)
        if runs is None:
            return [_whole(fit(name, each, options, progress=progress)) for each in problems]
        share = (time.perf_counter() - started) / len(waiting)
        for each, run in zip(waiting, runs, strict=True):
            each.seconds += share
            each.go_on(run)
    return [_whole(each.found(problem)) for each, problem in zip(fits, problems, strict=True)]


def _whole(found: Fit) -> Fit:
    if found.interrupted:
        raise KeyboardInterrupt
    return found


class _Fit:
    """A fit that stops where it asks for a training.

    :param problem: the problem, with the program that all posteriors share.
    """

    def __init__(self, entry: Entry, problem: Problem, options: Options, progress: bool) -> None:
        self.entry, self.problem = entry, problem
        self.options, self.progress = options, progress
        self.fitting: Any = None
        self.asked: Asked | None = None
        self.seconds = 0.0

    def go_on(self, run: Training | None = None) -> None:
        """Go on to the next training that the fit asks for, or to its end.

        :param run: the record of the training that was asked for.
        """
        started = time.perf_counter()
        with process_seeded(self.options.seed, self.problem.x.device):
            if run is None:
                self.problem = replace(self.problem, model=self.entry.program(self.problem))
                self.fitting = self.entry.function(self.problem, self.options, self.progress)
            try:
                self.asked = None if isinstance(self.fitting, Result) else self.fitting.send(run)
            except StopIteration as end:
                self.fitting, self.asked = end.value, None
        self.seconds += time.perf_counter() - started
        if self.asked is None and self.fitting.interrupted:
            raise KeyboardInterrupt

    def found(self, problem: Problem) -> Fit:
        """The finished fit."""
        with process_seeded(self.options.seed, problem.x.device):
            return with_bounds(
                self.entry.name, problem, self.fitting, self.seconds, progress=self.progress
            )


def _train(fits: Sequence[_Fit], options: Options) -> list[Training] | None:
    """Train the guides of all data sets at once; None if that is not possible."""
    asked = [each.asked for each in fits if each.asked is not None]
    settings = dict(asked[0].settings)
    if not settings.keys() <= _KNOWN:
        return None
    chosen = {id(each) for each in settings.pop("parameters", fits[0].problem.model.parameters())}
    first = min((each.problem for each in fits), key=lambda problem: len(problem.x))
    size = rows_per_step(first.model, len(first.x), settings.pop("batch_size", None))
    guides = [each.guide for each in asked]
    with process_seeded(options.seed, first.x.device):
        try:
            copies = OnOwnData(
                [each.problem.model for each in fits],
                guides,
                [(each.problem.x, each.problem.y) for each in fits],
                fixed=not chosen & {id(each) for each in fits[0].problem.model.parameters()},
            )
        except (UnsupportedProgramError, ValueError):
            return None
        settings.setdefault("num_particles", guides[0].num_members)
        label = asked[0].label
        losses = copies.train(
            **settings,
            batch_size=size,
            progress=label is not None and not hidden(None),
            label=label or "folds",
        )
    for place, guide in enumerate(guides):
        copies.put(place, guide)
    return [Training(of_one, size, False) for of_one in losses.unbind(1)]

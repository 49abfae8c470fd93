"""A posterior fitted to several data sets, such as folds, whose trainings run at once."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.base import Guide
from pyro_bdl.posteriors.registry import Fit, Options, Problem, fit
from pyro_bdl.training.descent import Training, rows_per_step
from pyro_bdl.training.parallel_guides import OnOwnData
from pyro_bdl.utils.progress import hidden
from pyro_bdl.utils.random_state import process_seeded

# The arguments of ``training.train`` that trainings at once know too.
_KNOWN = {"steps", "learning_rate", "temperature", "num_particles", "estimator", "batch_size"}


class _Asked(Exception):
    """Raised by a posterior's function as soon as it trains a guide."""

    def __init__(self, guide: Guide, settings: dict[str, Any]) -> None:
        super().__init__("a guide is to be trained")
        self.guide, self.settings = guide, settings


@dataclass(frozen=True)
class _Asking(Problem):
    """A problem whose first training is put off, to be done with those of other problems."""

    def train(self, guide: Guide, *, progress: str | None, **settings: Any) -> Training:
        guide.prototype(self.x, self.y)
        raise _Asked(guide, settings)


@dataclass(frozen=True)
class _Trained(Problem):
    """A problem whose first training has been done.

    :param copies: the trainings done at once, of which this problem's is number ``place``.
    """

    copies: OnOwnData | None = None
    losses: Any = None
    size: int = 0
    place: int = 0
    done: list[bool] = field(default_factory=list)

    def train(self, guide: Guide, *, progress: str | None, **settings: Any) -> Training:
        if self.done or self.copies is None:
            return super().train(guide, progress=progress, **settings)
        self.done.append(True)
        guide.prototype(self.x, self.y)
        self.copies.put(self.place, guide)
        return Training(self.losses[:, self.place], self.size, False)


def fit_together(
    name: str,
    problems: Sequence[Problem],
    options: Options | None = None,
    *,
    progress: bool = False,
) -> list[Fit]:
    """Fit a registered posterior to each of several data sets of one program.

    The first training by SVI of each fit is done for all data sets at once, by ``vmap``; what
    follows, such as a Laplace approximation, is done for one after another. So is all of a fit
    without such a training (Markov chains, or a prior scale that is trained too).

    :param problems: programs alike, each for its data.
    :returns: the fits; ``seconds`` holds an equal share of the common training.
    :raises ValueError: for a name that is not registered, or from the posterior's function.
    """
    options = options or Options()
    asked: list[_Asked] = []
    for problem in problems:
        try:
            asking = _Asking(problem.model, problem.x, problem.y)
            first = fit(name, asking, options, progress=progress)
        except _Asked as request:
            asked.append(request)
        else:  # a posterior without training by SVI
            return [first, *(fit(name, each, options, progress=progress) for each in problems[1:])]
    started = time.perf_counter()
    label = name if progress else None
    trained = _train(problems, asked, options, label)
    if trained is None:
        return [fit(name, problem, options, progress=progress) for problem in problems]
    copies, losses, size = trained
    share = (time.perf_counter() - started) / len(problems)
    found = []
    for place, problem in enumerate(problems):
        known = _Trained(problem.model, problem.x, problem.y, copies, losses, size, place)
        made = fit(name, known, options, progress=progress)
        found.append(replace(made, seconds=made.seconds + share))
    return found


def _train(
    problems: Sequence[Problem], asked: Sequence[_Asked], options: Options, label: str | None
) -> tuple[OnOwnData, Any, int] | None:
    """Train the guides of all problems at once; None if that is not possible."""
    settings = dict(asked[0].settings)
    if not settings.keys() <= _KNOWN:
        return None
    guides = [request.guide for request in asked]
    first = problems[0]
    smallest = min(problems, key=lambda problem: len(problem.x))
    size = rows_per_step(smallest.model, len(smallest.x), settings.pop("batch_size", None))
    with process_seeded(options.seed, first.x.device):
        try:
            data = [(problem.x, problem.y) for problem in problems]
            copies = OnOwnData(first.model, guides, data)
        except (UnsupportedProgramError, ValueError):
            return None
        settings.setdefault("num_particles", guides[0].num_members)
        still = True if label is None else hidden(None)
        losses = copies.train(
            **settings, batch_size=size, progress=not still, label=label or "folds"
        )
    return copies, losses, size

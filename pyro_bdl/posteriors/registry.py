"""The registry of posteriors: problems, options, entries and fits."""

import difflib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bdl import evidence
from pyro_bdl.comparison.costs import Costs, peak_memory, wait_for
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.guides import LaplaceGuide
from pyro_bdl.guides.base import Guide
from pyro_bdl.training.svi import estimate_elbo, train
from pyro_bdl.utils.random_state import seeded


@dataclass(frozen=True)
class Problem:
    """The program and the data that a posterior is fitted to.

    :param model: a program ``model(x, y)``; for minibatches its ``num_data`` is N.
    :param x: ``(N, ...)``, the training inputs.
    :param y: ``(N, ...)``, their targets.
    """

    model: nn.Module
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Options:
    """Options of a fit; each posterior reads the options that concern it.

    :param seed: seed of all random numbers.
    :param steps: gradient steps of a guide; None for each guide's default.
    :param chains: number of Markov chains.
    :param warmup: adapting iterations of each chain, which are not kept.
    :param draws: draws of each chain after the warm-up.
    :param max_tree_depth: NUTS takes at most 2^depth gradient steps per draw.
    :param rounds: of MAP training and hyperparameters by turns, for Laplace approximations.
    :param snapshots: points of SGD that SWAG collects.
    :param settling: steps of SGHMC at each of two smaller step sizes, before its warm-up.
    """

    seed: int = 0
    steps: int | None = None
    chains: int = 4
    warmup: int = 500
    draws: int = 500
    max_tree_depth: int = 8
    rounds: int = 4
    snapshots: int = 40
    settling: int = 250


@dataclass(frozen=True)
class Result:
    """Result of a registered function.

    :param posterior: a guide or ``Samples``.
    :param settings: what it was made with.
    :param interrupted: whether Ctrl-C ended the fit early.
    """

    posterior: Any
    settings: Mapping[str, Any] = field(default_factory=dict)
    interrupted: bool = False


@dataclass(frozen=True)
class Fit:
    """A fitted posterior.

    :param name: its name in the registry.
    :param posterior: a guide or ``Samples``.
    :param seconds: wall-clock time of the fit.
    :param elbo: the bound at temperature 1 in nats; None if the posterior has no density.
    :param settings: what it was made with.
    :param interrupted: whether Ctrl-C ended the fit early.
    :param log_evidence: the log marginal likelihood of a Laplace approximation, in nats.
    :param peak_memory: peak memory of the fit in bytes beyond the memory in use before, if known.
    """

    name: str
    posterior: Any
    seconds: float
    elbo: float | None
    settings: Mapping[str, Any]
    interrupted: bool = False
    log_evidence: float | None = None
    peak_memory: int | None = None

    @property
    def costs(self) -> Costs:
        """The costs of the fit, for ``compare``."""
        return Costs(
            seconds=self.seconds,
            elbo=self.elbo,
            log_evidence=self.log_evidence,
            peak_memory=self.peak_memory,
        )


FitFunction = Callable[[Problem, Options, bool], Result]
ProgramFunction = Callable[[Problem], nn.Module]


def given_program(problem: Problem) -> nn.Module:
    """The problem's program as it is."""
    return problem.model


@dataclass(frozen=True)
class Entry:
    """An entry of the registry; see ``register``."""

    name: str
    title: str
    description: str
    function: FitFunction
    default: bool = False
    program: ProgramFunction = given_program


_registry: dict[str, Entry] = {}


def register(
    name: str,
    *,
    title: str,
    description: str,
    default: bool = False,
    program: ProgramFunction = given_program,
) -> Callable[[FitFunction], FitFunction]:
    """Decorate ``function(problem, options, progress) -> Result`` to make it known by ``name``.

    :param name: the name for users, in lower case with hyphens.
    :param title: a few words for tables and reports.
    :param description: one sentence for help texts.
    :param default: whether ``pyro-bdl compare`` fits it by default. The default posteriors are one
        of each kind, and take about two minutes together on the default data.
    :param program: makes the program of the posterior from the problem, if it is another one than
        the problem's, for example with a learned prior. The function gets a problem with it.
    :raises ValueError: if the name is taken.
    """
    if name in _registry:
        raise ValueError(f"a posterior named {name!r} is registered already")

    def keep(function: FitFunction) -> FitFunction:
        _registry[name] = Entry(name, title, description, function, default, program)
        return function

    return keep


def entries() -> tuple[Entry, ...]:
    """All registered posteriors, in the order of registration."""
    return tuple(_registry.values())


def get(name: str) -> Entry:
    """Look up a registered posterior.

    :raises ValueError: for a name that is not registered; the error lists the registered names.
    """
    if name in _registry:
        return _registry[name]
    near = difflib.get_close_matches(name, _registry, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown posterior {name!r} (there are {', '.join(_registry)}){hint}")


def fit(
    name: str, problem: Problem, options: Options | None = None, *, progress: bool = False
) -> Fit:
    """Fit a registered posterior, time it and estimate its ELBO.

    Every fit starts from the options' seed, so that it does not depend on earlier fits.
    The process's generators are put back after.

    :raises ValueError: for a name that is not registered, or from the posterior's function.
    :raises KeyboardInterrupt: for Ctrl-C before there is anything to keep.
    """
    entry, options = get(name), options or Options()
    device = problem.x.device
    with seeded(options.seed):
        started = time.perf_counter()
        with peak_memory(device) as peak:
            own = replace(problem, model=entry.program(problem))
            result = entry.function(own, options, progress)
        wait_for(problem.x)
        seconds = time.perf_counter() - started
        elbo = log_evidence = None
        interrupted = result.interrupted
        try:
            elbo = _elbo(problem, result.posterior, None if progress else False)
            log_evidence = _log_evidence(result.posterior)
        except KeyboardInterrupt:  # what was fitted is kept
            interrupted = True
    return Fit(
        name=name,
        posterior=result.posterior,
        seconds=seconds,
        elbo=elbo,
        settings=result.settings,
        interrupted=interrupted,
        log_evidence=log_evidence,
        peak_memory=peak.bytes,
    )


def fit_together(
    name: str,
    problems: Sequence[Problem],
    options: Options | None = None,
    *,
    progress: bool = False,
) -> list[Fit]:
    """Fit a registered posterior to each of several data sets of one program, such as folds.

    :raises ValueError: for a name that is not registered, or from the posterior's function.
    :raises KeyboardInterrupt: for Ctrl-C, which keeps nothing.
    """
    fits = []
    for problem in problems:
        fits.append(fit(name, problem, options, progress=progress))
        if fits[-1].interrupted:
            raise KeyboardInterrupt
    return fits


def _log_evidence(posterior: Any) -> float | None:
    if not isinstance(posterior, LaplaceGuide):
        return None
    with torch.no_grad():
        return float(evidence.log_marginal_likelihood(posterior))


def _elbo(problem: Problem, posterior: Any, progress: bool | None) -> float | None:
    if not isinstance(posterior, Guide) or not posterior.has_density:
        return None
    return estimate_elbo(problem.model, posterior, problem.x, problem.y, progress=progress)


def trained(
    guide: Guide,
    problem: Problem,
    options: Options,
    label: str | None,
    *,
    steps: int,
    elbo: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    **bound: Any,
) -> Result:
    """Train a guide by SVI.

    :param label: description of the progress bar; None for no bar.
    :param steps: where the options have no number of steps.
    :param elbo: as of ``training.train``; so is ``optimizer``.
    :param bound: options of ``TemperedTraceMeanField_ELBO``, where there is no ``elbo``.
    """
    model, data, steps = problem.model, (problem.x, problem.y), options.steps or steps
    guide.prototype(*data)
    bound = {"num_particles": guide.num_members, **bound}
    chosen = TemperedTraceMeanField_ELBO(**bound) if elbo is None else elbo
    run = train(model, guide, *data, steps=steps, elbo=chosen, optimizer=optimizer, progress=label)
    objects = {"elbo": elbo, "optimizer": optimizer}
    words = {name: type(value).__name__ for name, value in objects.items() if value is not None}
    settings = {"steps": steps, **(bound if elbo is None else {}), **words}
    return Result(guide, {**settings, "batch_size": run.batch_size}, run.interrupted)

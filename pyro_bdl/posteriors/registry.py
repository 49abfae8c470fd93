"""The registry of posteriors: problems, options, entries and fits."""

import difflib
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bdl.comparison.costs import Costs, Peak, peak_memory, wait_for
from pyro_bdl.curvature.hyperparameters import ParameterReading, followed
from pyro_bdl.elbo.compiled import bound_for
from pyro_bdl.evidence.formula import Formula, read_guide
from pyro_bdl.guides import LaplaceGuide
from pyro_bdl.guides.base import Guide
from pyro_bdl.training.svi import estimate_elbo, train
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.validation import whole_number


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
    :raises ValueError: for fewer than one step.
    """

    seed: int = 0
    steps: int | None = None
    chains: int = 4
    warmup: int = 250
    draws: int = 300
    max_tree_depth: int = 10
    rounds: int = 4
    snapshots: int = 40
    settling: int = 250

    def __post_init__(self) -> None:
        if self.steps is not None:
            whole_number(self.steps, "steps")


@dataclass(frozen=True)
class Problem:
    """The program and the data that a posterior is fitted to.

    :param model: a program ``model(x, y)``; for minibatches its ``num_data`` is N.
    :param x: ``(N, ...)``, the training inputs.
    :param y: ``(N, ...)``, their targets.
    :param options: of the fit.
    :param label: description of progress bars; None for no bars.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    options: Options = Options()
    label: str | None = None

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """The program's arguments."""
        return self.x, self.y

    @property
    def progress(self) -> bool:
        """True if bars are shown."""
        return self.label is not None


@dataclass(frozen=True)
class Result:
    """A fitted posterior, as a registered function returns it.

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
    :param costs: time and memory of the fit, its bound at temperature 1 where the posterior has a
        density, and the log evidence of a Laplace approximation.
    :param settings: what it was made with.
    :param interrupted: whether Ctrl-C ended the fit early.
    """

    name: str
    posterior: Any
    costs: Costs
    settings: Mapping[str, Any] = field(default_factory=dict)
    interrupted: bool = False


FitFunction = Callable[[Problem], Result]


@dataclass(frozen=True)
class Entry:
    """An entry of the registry; see ``register``."""

    name: str
    title: str
    description: str
    function: FitFunction
    default: bool
    program: Callable[[Problem], nn.Module]


_registry: dict[str, Entry] = {}


def register(
    name: str,
    title: str,
    description: str,
    *,
    default: bool = False,
    program: Callable[[Problem], nn.Module] = lambda problem: problem.model,
) -> Callable[[FitFunction], FitFunction]:
    """Decorate ``function(problem) -> Result`` to make it known by ``name``.

    :param name: the name for users, in lower case with hyphens.
    :param title: a few words for tables and reports.
    :param description: one sentence for help texts.
    :param default: whether ``pyro-bdl compare`` fits it by default. The default posteriors are one
        of each kind, and take less than a minute together on the default data.
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
    name: str,
    problem: Problem,
    options: Options | None = None,
    *,
    progress: bool = False,
    measure: bool = True,
) -> Fit:
    """Fit a registered posterior, time it and estimate its ELBO.

    Every fit starts from the options' seed, so that it does not depend on earlier fits.
    The process's generators are put back after.

    :param options: by default the problem's.
    :param measure: measure the peak memory too, which first collects all garbage of the process.
    :raises ValueError: for a name that is not registered, or from the posterior's function.
    :raises KeyboardInterrupt: for Ctrl-C before there is anything to keep.
    """
    entry, options = get(name), options or problem.options
    elbo = elbo_error = log_evidence = None
    with seeded(options.seed):
        started = time.perf_counter()
        with peak_memory(problem.x.device) if measure else nullcontext(Peak()) as peak:
            model, label = entry.program(problem), name if progress else None
            result = entry.function(replace(problem, model=model, options=options, label=label))
        wait_for(problem.x)
        seconds = time.perf_counter() - started
        posterior, interrupted = result.posterior, result.interrupted
        settings = dict(result.settings)
        try:
            if isinstance(posterior, Guide) and posterior.has_density:
                bar = None if progress else False
                elbo, elbo_error = estimate_elbo(
                    problem.model, posterior, *problem.data, with_error=True, progress=bar
                )
            if isinstance(posterior, LaplaceGuide):
                reading = read_guide(posterior)
                settings |= _hyperparameters(reading)
                log_evidence = Formula(posterior, reading).value().item()
        except KeyboardInterrupt:  # what was fitted is kept
            interrupted = True
    costs = Costs(seconds, elbo, log_evidence, peak.bytes, elbo_error)
    return Fit(name, posterior, costs, settings, interrupted)


def _hyperparameters(reading: ParameterReading) -> dict[str, str]:
    """The hyperparameters that the evidence can set, for tables."""
    found = {}
    for name, parameter in followed(reading).items():
        words = name.rpartition(".")[2].removeprefix("hyper_").replace("_", " ").split()
        if parameter.value.numel() == 1:
            found[" ".join(words)] = f"{parameter.value.item():.3g}"
    return found


def trained(
    problem: Problem,
    guide: Guide,
    *,
    steps: int,
    elbo: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    learning_rate: float = 0.01,
    **options: Any,
) -> Result:
    """Train a guide by SVI.

    :param steps: where the problem's options have no number of steps.
    :param elbo: as of ``training.train``; so are ``optimizer`` and ``learning_rate``.
    :param options: of the bound, where there is no ``elbo``.
    """
    steps = problem.options.steps or steps
    guide.prototype(*problem.data)
    settings: dict[str, Any] = {"steps": steps}
    if elbo is None:
        options = {"num_particles": guide.num_members, **options}
        elbo = bound_for(steps, **options)
        settings |= options
    else:
        settings["elbo"] = type(elbo).__name__
    if optimizer is not None:
        settings["optimizer"] = type(optimizer).__name__
    run = train(
        problem.model, guide, *problem.data, steps=steps, elbo=elbo, optimizer=optimizer,
        learning_rate=learning_rate, progress=problem.label, backend="auto",
    )  # fmt: skip
    return Result(guide, {**settings, "batch_size": run.batch_size}, run.interrupted)


def by_svi(family: Callable[[nn.Module], Guide], *, steps: int, **options: Any) -> FitFunction:
    """The function that trains a guide of a family, see ``trained``."""
    return lambda problem: trained(problem, family(problem.model), steps=steps, **options)

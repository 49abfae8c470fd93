"""The program of a comparison: its observed and latent sites, and draws of its posteriors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.comparison.held_out import Observation, Test
from pyro_bdl.distributions.take_apart import base_distribution, observation_mean
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.draws import samples_of_program, to_samples
from pyro_bdl.program.batches import leading_size
from pyro_bdl.program.layout import Latent
from pyro_bdl.program.program import Program
from pyro_bdl.program.trace import leave_open, record
from pyro_bdl.program.unconstrained_parameters import are_known
from pyro_bdl.samples import Samples
from pyro_bdl.utils.module_state import evaluation_mode

SEVERAL_SITES = (
    "Score each site by Predictive(model, posterior).log_likelihood(*data), all at once by "
    "to_arviz, or compare a program that observes one of them"
)


@dataclass(frozen=True)
class Subject:
    """The program of the posteriors.

    :param model: a Pyro program, called with the inputs and the target.
    :param observation: its observed site.
    :param latents: its latent sites; None if their shapes are unknown without a posterior.
    """

    model: Callable
    observation: Observation
    latents: Mapping[str, Latent] | None


@torch.no_grad()
def read_program(model: Callable, test: Test, posteriors: Mapping[str, Any]) -> Subject:
    """The program's observed and latent sites.

    :param posteriors: guides or ``Samples``. Draws of the first one are used if the program cannot
        be run without values, since its prior is improper.
    :raises ValueError: if the program has no observed site or several.
    :raises UnsupportedProgramError: if the program does not sample the site without targets, and
        its distribution with targets cannot be sampled either.
    """
    rows = test.part(slice(0, stated_num_data(model)))
    latents: Mapping[str, Latent] | None = None
    with evaluation_mode(model, dict(posteriors)):
        try:
            program = Program(model, *rows.inputs, rows.y)
            latents, at = program.latents, program.initial
            observed = program.run(at).observed
        except (NotImplementedError, UnsupportedProgramError):
            name, posterior = next(iter(posteriors.items()))
            draws = _to_samples(name, posterior, 1, rows).latents
            at = {site: value[0, 0] for site, value in draws.items()}
            run = record(model, at, (*rows.inputs, rows.y), draw=leave_open)
            observed = {n: s for n, s in run.observed.items() if s.value is not None}
        without = record(model, at, (*rows.inputs, None), draw=leave_open).observed
    if len(observed) != 1:
        sites = ", ".join(map(repr, observed)) or "none"
        raise ValueError(
            f"compare needs a program with one observed site, but it has: {sites}. {SEVERAL_SITES}"
        )
    ((name, site),) = observed.items()
    kind = type(base_distribution(site.distribution)).__name__
    if name not in without:
        if not are_known([site]):
            raise UnsupportedProgramError(
                f"the program does not sample the site {name!r} where the targets are None: write "
                "it with y=None as an argument and pyro.sample(..., obs=y)"
            )
        model = _AlwaysWithTargets(model, rows.y[:1])
    joint = rows.rows > 1 and site.distribution.event_shape.numel() == rows.y.numel()
    fixed = joint and latents is not None and _same_mean(program, name)
    return Subject(model, Observation(name, kind, are_known([site]), joint, fixed), latents)


def _same_mean(program: Program, site: str) -> bool:
    """Return whether the observation's mean does not depend on the latents."""
    elsewhere = program.constrain(program.unconstrain(program.initial) + 0.5)[0]
    runs = (program.run(latents) for latents in (program.initial, elsewhere))
    return torch.equal(*(observation_mean(run.observed[site].distribution) for run in runs))


class _AlwaysWithTargets:
    """Wrapper of a program that needs targets, such as those of ``pyro.contrib.gp``.

    If called with None, it passes placeholder targets, which do not affect predictions.

    :param target: the target of one row.
    """

    def __init__(self, model: Callable, target: Tensor) -> None:
        self.model, self.target = model, target

    def __call__(self, *args: Any) -> Any:
        *inputs, y = args
        if y is None:
            y = self.target.expand(leading_size(inputs), *self.target.shape[1:])
        return self.model(*inputs, y)


def draws_of(name: str, subject: Subject, posterior: Any, num_samples: int, test: Test) -> Samples:
    """Draw from a posterior once, so that all numbers in the table use the same draws.

    :param name: name of the posterior, for messages.
    :raises TypeError: if the posterior is neither a guide nor ``Samples``.
    :raises ValueError: for a posterior of another program; the error lists the sites that do not
        match.
    """
    samples = _to_samples(name, posterior, num_samples, test)
    if subject.latents is None:
        return samples
    try:
        return samples_of_program(subject.latents, posterior, samples)
    except ValueError as error:
        raise ValueError(f"posterior {name!r}: {error}") from error


def _to_samples(name: str, posterior: Any, num_samples: int, test: Test) -> Samples:
    try:
        return to_samples(posterior, num_samples, *test.inputs, None)
    except TypeError as error:
        raise TypeError(f"posterior {name!r}: {error}") from error


def stated_num_data(model: Any) -> int | None:
    """The N (``num_data``) of a program, also under handlers; None if it has none."""
    while not hasattr(model, "num_data") and hasattr(model, "model"):  # under a handler
        model = model.model
    return getattr(model, "num_data", None)

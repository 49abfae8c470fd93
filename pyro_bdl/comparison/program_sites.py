"""The program that is compared on: its observed and latent sites, and draws of posteriors of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.comparison.held_out import Observation, Test
from pyro_bdl.distributions.take_apart import base_distribution, observation_mean
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.draws import check_sites, latent_draws
from pyro_bdl.program.layout import Latent
from pyro_bdl.program.program import Program
from pyro_bdl.program.trace import leave_open, record
from pyro_bdl.program.unconstrained_parameters import are_known
from pyro_bdl.samples import Samples
from pyro_bdl.utils.module_state import evaluation_mode


@dataclass(frozen=True)
class Subject:
    """The program that the posteriors are of.

    :param model: a Pyro program, called with the inputs and the target.
    :param observation: its observed site.
    :param latents: its latent sites; None where their shapes cannot be read without a posterior.
    """

    model: Callable
    observation: Observation
    latents: Mapping[str, Latent] | None


@torch.no_grad()
def read_program(model: Callable, test: Test, posteriors: Mapping[str, Any]) -> Subject:
    """The program's observed and latent sites.

    :param posteriors: guides or ``Samples``, of which the first one helps where the program cannot
        be run alone, since its prior is improper.
    :raises ValueError: where it has no observed site or several.
    :raises UnsupportedProgramError: where it does not sample the site without targets, and its
        distribution is one that cannot be drawn from with them.
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
            draws = as_samples(name, posterior, 1, rows).latents
            at = {site: value[0, 0] for site, value in draws.items()}
            run = record(model, at, (*rows.inputs, rows.y), draw=leave_open)
            observed = {n: said for n, said in run.observed.items() if said.value is not None}
        without = record(model, at, (*rows.inputs, None), draw=leave_open).observed
    if len(observed) != 1:
        sites = ", ".join(map(repr, observed)) or "none"
        raise ValueError(f"compare needs a program with one observed site, but it has: {sites}")
    ((site, said),) = observed.items()
    kind = type(base_distribution(said.distribution)).__name__
    if site not in without:
        if not are_known([said]):
            raise UnsupportedProgramError(
                f"the program does not sample the site {site!r} where the targets are None: write "
                "it with y=None as an argument and pyro.sample(..., obs=y)"
            )
        model = _AlwaysWithTargets(model, rows.y[:1])
    joint = rows.rows > 1 and said.distribution.event_shape.numel() == rows.y.numel()
    fixed = joint and latents is not None and _same_mean(program, site)
    return Subject(model, Observation(site, kind, are_known([said]), joint, fixed), latents)


def _same_mean(program: Program, site: str) -> bool:
    """Return True where the observation has one mean, wherever the latents are."""
    elsewhere = program.constrain(program.unconstrain(program.initial) + 0.5)[0]
    runs = (program.run(latents) for latents in (program.initial, elsewhere))
    return torch.equal(*(observation_mean(run.observed[site].distribution) for run in runs))


class _AlwaysWithTargets:
    """A program that samples its site with targets only, as those of ``pyro.contrib.gp``: called
    with None it gets others in their place, which predictions do not depend on.

    :param target: the targets of one row.
    """

    def __init__(self, model: Callable, target: Tensor) -> None:
        self.model, self.target = model, target

    def __call__(self, *args: Any) -> Any:
        *inputs, y = args
        if y is None:
            y = self.target.expand(len(inputs[0]), *self.target.shape[1:])
        return self.model(*inputs, y)


def as_samples(name: str, posterior: Any, num_samples: int, test: Test) -> Samples:
    """Draws made once, so that every number in the table is of the same ones."""
    if isinstance(posterior, Samples):
        return posterior
    try:
        latents = latent_draws(posterior, num_samples, *test.inputs, None)
    except TypeError as error:
        raise TypeError(f"posterior {name!r}: {error}") from error
    return Samples({site: value.detach()[None] for site, value in latents.items()})


def of_program(name: str, subject: Subject, posterior: Any, samples: Samples) -> Samples:
    """The program's latents among the draws; Pyro's own guides have auxiliary sites too.

    :raises ValueError: for a posterior of another program, with the sites that do not match.
    """
    if subject.latents is None:
        return samples
    latents = dict(samples.latents)
    if not isinstance(posterior, Guide | Samples):
        latents = {site: value for site, value in latents.items() if site in subject.latents}
    try:
        check_sites(subject.latents, latents)
    except ValueError as error:
        raise ValueError(f"posterior {name!r}: {error}") from error
    return Samples(latents, samples.stats, samples.info)


def stated_num_data(model: Any) -> int | None:
    """The N that a program knows of, also under handlers; None where it does not."""
    while not hasattr(model, "num_data") and hasattr(model, "model"):  # under a handler
        model = model.model
    return getattr(model, "num_data", None)

"""The program of a comparison: its observed and latent sites, and draws of its posteriors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.comparison.held_out import Observation, Test
from pyro_bdl.comparison.several_sites import SeveralSites
from pyro_bdl.distributions.take_apart import observation_kind, observation_mean
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.draws import samples_of_program, to_samples
from pyro_bdl.program.layout import Latent
from pyro_bdl.program.program import Program
from pyro_bdl.program.trace import Run, Site, leave_open, record
from pyro_bdl.program.unconstrained_parameters import are_known
from pyro_bdl.samples import Samples
from pyro_bdl.utils.module_state import evaluation_mode


@dataclass(frozen=True)
class Subject:
    """The program of the posteriors.

    :param model: a Pyro program, called with the inputs and the target.
    :param observation: its observed site, or all of them as one.
    :param latents: its latent sites; None if their shapes are unknown without a posterior.
    :param needs_targets: whether it samples its observed site with targets only.
    :param several: its observed sites if there are several.
    :param posteriors: guides or ``Samples``, which give values to latents with an improper prior.
    """

    model: Callable
    observation: Observation
    latents: Mapping[str, Latent] | None
    needs_targets: bool = False
    several: SeveralSites | None = None
    posteriors: Mapping[str, Any] = field(default_factory=dict)

    @property
    def most_rows(self) -> int | None:
        """The largest number of rows that predictions are for at once; None for any."""
        by_rows = self.several is not None and self.several.by_rows
        return stated_num_data(self.model) if by_rows else None

    @torch.no_grad()
    def data(self, test: Test) -> Test:
        """Data as they are used for this program."""
        if self.several is None:
            return replace(test, needs_targets=self.needs_targets)
        parts, size = [test], self.most_rows
        if size is not None:
            parts = [test.part(slice(i, i + size)) for i in range(0, test.rows, size)]
        found = []
        with evaluation_mode(self.model, dict(self.posteriors)):
            for part in parts:
                run = _first_run(self.model, part, self.posteriors)[0]
                found.append(self.several.data(part, run))
        if len(found) == 1:
            return found[0]
        whole = torch.cat([part.y for part in found])
        return Test(test.inputs, whole, test.given())


@torch.no_grad()
def read_program(model: Callable, test: Test, posteriors: Mapping[str, Any]) -> Subject:
    """The program's observed and latent sites.

    :param posteriors: guides or ``Samples``. Draws of the first one are used if the program cannot
        be run without values, since its prior is improper.
    :raises ValueError: if the program has no observed site.
    :raises UnsupportedProgramError: if the program does not sample the site without targets, and
        its distribution with targets cannot be sampled either.
    """
    rows = test.first(stated_num_data(model))
    with evaluation_mode(model, dict(posteriors)):
        run, program, at = _first_run(model, rows, posteriors)
        if not run.observed:
            raise ValueError(
                "compare needs a program with an observed site: pass the targets last, and write "
                "the likelihood as pyro.sample(..., obs=y)"
            )
        latents = None if program is None else program.latents
        if len(run.observed) > 1 or not _are_targets(rows.y, next(iter(run.observed.values()))):

            def again(part: slice) -> Run | None:
                try:
                    return _first_run(model, rows.part(part), posteriors)[0]
                except (ValueError, RuntimeError, IndexError):
                    return None

            several = SeveralSites.of(run, rows.given(), again)
            return Subject(
                model, several.observation, latents, several=several, posteriors=posteriors
            )
        without = record(model, at, rows.asked(), draw=leave_open).observed
    ((name, site),) = run.observed.items()
    kind = observation_kind(site.distribution)
    if name not in without and not are_known([site]):
        raise UnsupportedProgramError(
            f"the program does not sample the site {name!r} where the targets are None: write "
            "it with y=None as an argument and pyro.sample(..., obs=y)"
        )
    joint = rows.rows > 1 and site.distribution.event_shape.numel() == rows.y.numel()
    fixed = joint and program is not None and _same_mean(program, name)
    observation = Observation(name, kind, are_known([site]), joint, fixed)
    return Subject(model, observation, latents, needs_targets=name not in without)


def _are_targets(y: Any, site: Site) -> bool:
    """Return whether the last argument holds the numbers that a site observes, in their order."""
    if not isinstance(y, Tensor) or y.numel() != site.value.numel():
        return False
    return torch.equal(y.reshape(-1).to(site.value), site.value.reshape(-1))


def _first_run(
    model: Callable, rows: Test, posteriors: Mapping[str, Any]
) -> tuple[Run, Program | None, Mapping[str, Tensor]]:
    """A run on the data with the observed sites that have values, the program, and the latents.

    The program is None if its prior is improper; a draw of the first posterior then gives the
    latents.
    """
    program: Program | None = None
    try:
        program = Program(model, *rows.given())
        at: Mapping[str, Tensor] = program.initial
        run = program.run(at)
    except (NotImplementedError, UnsupportedProgramError):
        name, posterior = next(iter(posteriors.items()))
        draws = _to_samples(name, posterior, 1, rows).latents
        at = {site: value[0, 0] for site, value in draws.items()}
        run = record(model, at, rows.given(), draw=leave_open)
    observed = {name: site for name, site in run.observed.items() if site.value is not None}
    return replace(run, observed=observed), program, at


def _same_mean(program: Program, site: str) -> bool:
    """Return whether the observation's mean does not depend on the latents."""
    elsewhere = program.constrain(program.unconstrain(program.initial) + 0.5)[0]
    runs = (program.run(latents) for latents in (program.initial, elsewhere))
    return torch.equal(*(observation_mean(run.observed[site].distribution) for run in runs))


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
        return to_samples(posterior, num_samples, *test.asked())
    except TypeError as error:
        raise TypeError(f"posterior {name!r}: {error}") from error


def stated_num_data(model: Any) -> int | None:
    """The N (``num_data``) of a program, also under handlers; None if it has none."""
    while not hasattr(model, "num_data") and hasattr(model, "model"):  # under a handler
        model = model.model
    return getattr(model, "num_data", None)

"""The targets among a program's arguments, and their replacement by other values."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.program.program import Program
from pyro_bdl.program.trace import Site, leave_open, record
from pyro_bdl.utils.module_state import evaluation_mode

Arguments = tuple[tuple, dict[str, Any]]


class Targets:
    """The arguments of a program's run that are values of its observed sites.

    An argument that is the value of a site itself is its target. If a site's value is not an
    argument, but for example a reshaped copy, arguments with the same numbers are its targets. Of a
    dict, entries by the name of an observed site may be targets.

    :param program: a program that was run with its targets.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        observed = program.run(program.initial).observed
        self.observed = {name: site for name, site in observed.items() if site.value is not None}
        given = {id(value) for value in self._candidates()}
        self._copied = [n for n, site in self.observed.items() if id(site.value) not in given]

    def site_of(self, value: Any) -> str | None:
        """The observed site with an argument as its value, up to the shape; None if it is not a
        target."""
        if not isinstance(value, Tensor):
            return None
        for name, site in self.observed.items():
            if site.value is value:
                return name
        return next((n for n in self._copied if _same(self.observed[n], value)), None)

    def replaced(self, by: Callable[[str, Tensor], Any]) -> Arguments:
        """The arguments with every target replaced by ``by(site, target)``."""

        def put(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: put(v) if key in self.observed else v for key, v in value.items()}
            site = self.site_of(value)
            return value if site is None else by(site, value)

        program = self.program
        return tuple(map(put, program.args)), {key: put(v) for key, v in program.kwargs.items()}

    def _candidates(self) -> Iterator[Any]:
        """The arguments, and the entries of dicts by names of observed sites."""
        for value in (*self.program.args, *self.program.kwargs.values()):
            if isinstance(value, dict):
                yield from (value[key] for key in self.observed if key in value)
            else:
                yield value

    def removed(self) -> Arguments:
        """The arguments with the targets replaced by None.

        They are unchanged if the program does not run without targets, for example because it
        counts the rows of y.
        """
        found = self.replaced(lambda site, target: None)
        try:
            with torch.no_grad(), evaluation_mode(self.program.model):
                record(self.program.model, self.program.initial, *found, draw=leave_open)
        except (AttributeError, TypeError):
            return self.program.args, self.program.kwargs
        return found

    def with_values(self, values: Mapping[str, Tensor]) -> Arguments:
        """The arguments with the targets replaced by other values of the observed sites."""
        return self.replaced(lambda site, target: values[site].reshape(target.shape).to(target))

    def require_arguments(self) -> None:
        """Check that all observed data are arguments.

        :raises ValueError: if an observed site's data are not an argument of the program.
        """
        found = {self.site_of(value) for value in self._candidates()}
        missing = [name for name in self.observed if name not in found]
        if missing:
            raise ValueError(
                f"the data of the observed site '{missing[0]}' are not an argument of the program "
                "and cannot be replaced: pass them to it"
            )


def _same(site: Site, value: Tensor) -> bool:
    held = site.value
    if not isinstance(held, Tensor) or held.numel() != value.numel():
        return False
    return torch.equal(held.reshape(-1), value.reshape(-1).to(held))

"""The targets among a program's arguments, and their replacement by other values."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.program.check import named_arguments
from pyro_bdl.program.program import Program
from pyro_bdl.program.trace import Site, placeholder_for_observed, record
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.trees import tree_flatten, tree_unflatten

Arguments = tuple[tuple, dict[str, Any]]


class TargetArguments:
    """The arguments of a program's run that are values of its observed sites.

    An argument, or an entry of a dict, is the target of a site if the program observes its numbers,
    in their order: the argument itself, a view of it (``y.reshape(-1)``), or under its name, as
    for ``y`` of the site ``y``, a copy (``y.float()``).

    :param program: a program that was run with its targets.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._leaves, self._structure = tree_flatten((program.args, program.kwargs))
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        with_copies = copy.copy(program)  # of which no two share memory
        with_copies.args, with_copies.kwargs = tree_unflatten(copies, self._structure)
        observed = with_copies.run(program.initial).observed
        self.observed = {name: site for name, site in observed.items() if site.value is not None}
        numbers = tree_unflatten(range(len(copies)), self._structure)
        places = named_arguments(program.model, *numbers)
        self._sites: dict[int, str] = {}
        for name, site in self.observed.items():
            named = {n for place, n in places.items() if place == name or f"[{name!r}]" in place}
            for number, leaf in enumerate(copies):
                if _same(site, leaf) and (number in named or _share_memory(site.value, leaf)):
                    self._sites[number] = name

    def site_of(self, value: Any) -> str | None:
        """The observed site of which an argument is the target; None if it is not one."""
        sites = (self._sites[n] for n in self._sites if self._leaves[n] is value)
        return next(sites, None)

    def replaced(self, by: Callable[[str, Tensor], Any]) -> Arguments:
        """The arguments with every target replaced by ``by(site, target)``."""
        leaves = list(self._leaves)
        for number, site in self._sites.items():
            leaves[number] = by(site, leaves[number])
        return tree_unflatten(leaves, self._structure)

    def removed(self) -> Arguments:
        """The arguments with the targets replaced by None.

        They are unchanged if the program does not run without targets, for example because it
        counts the rows of y.
        """
        arguments = self.replaced(lambda site, target: None)
        try:
            with torch.no_grad(), evaluation_mode(self.program.modules):
                record(
                    self.program.model,
                    self.program.initial,
                    *arguments,
                    draw=placeholder_for_observed,
                )
        except (AttributeError, TypeError):
            return self.program.args, self.program.kwargs
        return arguments

    def with_values(self, values: Mapping[str, Tensor]) -> Arguments:
        """The arguments with the targets replaced by other values of the observed sites."""
        return self.replaced(lambda site, target: values[site].reshape(target.shape).to(target))

    def require_arguments(self) -> None:
        """Check that all observed data are arguments.

        :raises ValueError: if an observed site's data are not an argument of the program.
        """
        missing = [name for name in self.observed if name not in self._sites.values()]
        if missing:
            raise ValueError(
                f"the data of the observed site '{missing[0]}' are not an argument of the program "
                "and cannot be replaced: pass them to it"
            )


def _same(site: Site, value: Any) -> bool:
    observed = site.value
    if not isinstance(observed, Tensor) or not isinstance(value, Tensor):
        return False
    if observed.numel() != value.numel() or value.layout is not torch.strided:
        return False
    return torch.equal(observed.reshape(-1), value.reshape(-1).to(observed))


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()

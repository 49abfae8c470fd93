"""The graph of a bound for a program and a guide."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyro
from pyro import poutine
from torch import Tensor, nn

from pyro_bdl.guides.base import Guide
from pyro_bdl.tracing.arguments import Given
from pyro_bdl.tracing.guards import Guards, Snapshot
from pyro_bdl.tracing.step import Step, trace_step
from pyro_bdl.tracing.trace import NotTraceable
from pyro_bdl.utils.module_state import as_written, modules_of
from pyro_bdl.utils.side_effects import without_side_effects

if TYPE_CHECKING:
    from pyro_bdl.elbo.tempered import TemperedTrace_ELBO


@dataclass
class Pair:
    """A call: the program, the guide, and their arguments."""

    model: Callable
    guide: Any
    args: tuple
    kwargs: dict[str, Any]

    def modules(self) -> list[nn.Module]:
        return modules_of(self.model, self.guide)


class Graph:
    """The graph of a pair for one kind of arguments, or the reason why there is none.

    ``is_checked`` is True once the graph agreed with the program, in a step after the trace.
    """

    step: Step | None = None
    guards: Guards
    refused: str | None = None
    is_checked = False
    keeps_noise = False
    changes = 0

    def truths(self, given: Given) -> tuple[bool, ...] | None:
        """The truth values of arguments by which the program's control flow goes, where they are
        not those that the graph holds for; None where they are."""
        if self.step is None:
            return None
        found = self.step.truths.of(given.tensors)
        return None if found == self.step.truths.met else found

    def refuse(self, reason: str) -> None:
        self.step, self.refused = None, reason

    def make(
        self,
        bound: "TemperedTrace_ELBO",
        backend: str,
        pair: Pair,
        given: Given,
        temperature: Tensor,
    ) -> None:
        """Trace a step of the program and the guide.

        :raises NotTraceable: if the program cannot be traced.
        """
        self.step, self.is_checked = None, False
        guide = pair.guide
        self.keeps_noise = isinstance(guide, Guide) and guide.keeps_noise
        before = guide.last_noise if self.keeps_noise else None
        if isinstance(guide, Guide):
            guide.require_layout().kept = None  # no cached values: the graph computes them

        def loss(*tensors: Tensor) -> tuple[Tensor, ...]:
            args, kwargs = given.rebuild(tensors[:-1])
            with pyro.validation_enabled(False):
                likelihood, kl, q_entropy = bound.terms(pair.model, guide, args, kwargs)
            noise = guide.last_noise if self.keeps_noise else None
            value = bound.negative_bound(likelihood, kl, q_entropy, tensors[-1])
            return value, likelihood, kl, *([] if noise is None else [noise])

        modules, callables = pair.modules(), (pair.model, guide)
        snapshot = Snapshot(callables, modules)
        statements = poutine.trace(param_only=True)
        with without_side_effects(modules), as_written(modules), poutine.block(), statements:
            readable = len(given.tensors)
            step = trace_step(loss, [*given.tensors, temperature], backend, readable=readable)
        if self.keeps_noise:
            guide.last_noise = before
        change = snapshot.change()
        if change is not None:
            raise NotTraceable(f"a run changes the attribute '{change.key}' of {change.kind}")
        stored = pyro.get_param_store()._params
        parameters = {name: stored[name] for name in statements.trace.nodes if name in stored}
        self.guards = Guards(callables, modules, parameters, step.parameters, step.constants)
        self.step = step

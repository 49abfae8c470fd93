"""Losses and log densities as graphs of torch's operators, run in place of the program and compared
with it now and then."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import pyro
import torch
from pyro import poutine
from pyro.poutine.runtime import am_i_wrapped
from torch import Tensor, nn

from pyro_bdl.errors import warn
from pyro_bdl.tracing.step import Outcome, Step, agree, trace_step
from pyro_bdl.tracing.trace import NotTraceable
from pyro_bdl.utils.autocast import castings
from pyro_bdl.utils.autograd import is_transformed, with_gradients
from pyro_bdl.utils.memory import keep_freed_blocks
from pyro_bdl.utils.module_state import as_written, modules_of, without_side_effects
from pyro_bdl.utils.trees import TreeSpec, constants_of, tree_flatten, tree_unflatten

# ------------------------------------------------------------------------------- arguments

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Arguments(NamedTuple):
    """The tensors among a call's arguments, and the rest.

    :param constants: for each argument its type and value; None for a tensor.
    """

    tensors: list[Tensor]
    constants: tuple[tuple[type, Any] | None, ...]
    structure: TreeSpec

    @property
    def key(self) -> Hashable:
        """The key of a graph: all that it depends on besides the tensors' values."""
        kinds = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in self.tensors]
        return tuple(kinds), self.constants, str(self.structure)

    def rebuild(self, tensors: Sequence[Tensor]) -> tuple[tuple, dict[str, Any]]:
        """``(args, kwargs)`` with other tensors."""
        left = iter(tensors)
        leaves = [next(left) if c is None else c[1] for c in self.constants]
        return tree_unflatten(leaves, self.structure)


def split(args: tuple, kwargs: dict[str, Any]) -> Arguments:
    """Separate the tensors among a call's arguments from the rest.

    :raises NotTraceable: for arguments whose changes cannot be noticed, and for sparse tensors.
    """
    leaves, structure = tree_flatten((args, kwargs))
    for leaf in leaves:
        if type(leaf) not in (Tensor, nn.Parameter) and not isinstance(leaf, _CONSTANTS):
            raise NotTraceable(
                f"an argument holds {type(leaf).__name__}, which may change from step to step: "
                "pass tensors, numbers and words"
            )
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(tensor.layout is not torch.strided for tensor in tensors):
        raise NotTraceable("an argument is a sparse tensor")
    return Arguments(tensors, constants_of(leaves), structure)


# ---------------------------------------------------------------------------------- graphs


class Evaluation(Protocol):
    """One evaluation of a loss that can run plainly or as a graph.

    :ivar owner: the program (and guide) that is evaluated.
    :ivar key: what a graph depends on besides the values of tensors: shapes, dtypes, devices,
        arguments that are not tensors, modes.
    """

    owner: Hashable
    key: Hashable

    def plain(self) -> Tensor:
        """Run the program; return its loss."""

    def tensors(self) -> Sequence[Tensor]:
        """The arguments of the graph."""

    def traced(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The loss and further results as a function of ``tensors``, to be traced."""

    def modules(self) -> list[nn.Module]:
        """The modules of the program, whose buffers an evaluation may change."""

    def size(self, loss: Tensor) -> Tensor:
        """The number that errors of the loss are compared with, by default its absolute value."""
        return loss.detach().abs()


@dataclass
class Graph:
    """The graph of one kind of evaluations; ``step`` is None where the program runs uncompiled.

    :param parameters: those in Pyro's store that it reads, by name.
    :param evaluations: how often the loss was evaluated since it was traced, that time included.
    """

    step: Step | None = None
    parameters: dict[str, Tensor] = field(default_factory=dict)
    evaluations: int = 0
    num_traces: int = 0

    def is_due(self) -> bool:
        """Return whether this evaluation is compared with the program: 2, 4, 8, ..."""
        return self.evaluations.bit_count() == 1

    def reads_current_parameters(self) -> bool:
        """Return whether Pyro's store still holds the same tensors, and all leaves are trained."""
        assert self.step is not None
        stored = dict(pyro.get_param_store().named_parameters())
        return all(stored.get(name) is value for name, value in self.parameters.items()) and all(
            leaf.requires_grad for leaf in self.step.leaves if isinstance(leaf, Tensor)
        )


class CompiledLoss:
    """A loss whose evaluations run as graphs, one for each key.

    The first evaluation runs the program and traces it (``make_fx``). Evaluations 2, 4, 8, ... run
    program and graph with the same random numbers, and compare loss and gradients; the others run
    the graph alone. The contract: between evaluations nothing that the program reads changes but
    its arguments, parameters, buffers and random numbers. Where a comparison shows that something
    else did, the program is traced again, with a warning.

    :param subject: the name that warnings begin with.
    :param backend: of ``pyro_bdl.tracing.step.BACKENDS``.
    :param max_graphs: the largest number of keys of one owner, and of traces of one key; beyond it
        the program runs uncompiled.
    """

    def __init__(self, subject: str, backend: str = "eager", max_graphs: int = 8) -> None:
        self.subject, self.backend, self.max_graphs = subject, backend, max_graphs
        self.num_traces = 0  # times that a program was traced
        self.num_replays = 0  # evaluations that ran only a graph
        self.graphs: dict[tuple[Hashable, Hashable], Graph] = {}
        self._warned: set[str] = set()

    def __call__(self, evaluation: Evaluation) -> Tensor | Outcome:
        """Return the plain loss, or the outcome of a graph."""
        key = evaluation.owner, evaluation.key
        graph = self.graphs.get(key)
        if graph is None or graph.step is None or not graph.reads_current_parameters():
            loss = evaluation.plain()
            if graph is None and self._has_room(evaluation.owner):
                graph = self.graphs[key] = Graph()
                self._trace(graph, evaluation)
            elif graph is not None and graph.step is not None:
                self._trace(graph, evaluation)
            return loss
        graph.evaluations += 1
        if graph.is_due():
            return self._compare(graph, graph.step, evaluation)
        self.num_replays += 1
        if am_i_wrapped():  # tell SVI which parameters to optimize
            for name in graph.parameters:
                pyro.param(name)
        return graph.step(evaluation.tensors())

    def warn(self, reason: str) -> None:
        """Warn once that a program runs uncompiled, or that its graph was stale."""
        if reason not in self._warned:
            self._warned.add(reason)
            warn(f"{self.subject} {reason}", "uncompiled", stacklevel=6)

    def _has_room(self, owner: Hashable) -> bool:
        """Return whether there is room for another graph; drop one of another owner if need be."""
        if len(self.graphs) < self.max_graphs:
            return True
        others = [key for key in self.graphs if key[0] != owner]
        if others:
            del self.graphs[others[0]]
            return True
        self.warn(
            "runs the program uncompiled, since its arguments come in more than "
            f"{self.max_graphs} shapes or with more than {self.max_graphs} values of other "
            "arguments; the first ones stay compiled: pad the arguments, pass numbers as tensors, "
            "or raise max_graphs"
        )
        return False

    def _refuse(self, graph: Graph, reason: str) -> None:
        graph.step = None
        self.warn(f"runs the program uncompiled, since {reason}")

    def _trace(self, graph: Graph, evaluation: Evaluation) -> None:
        self.num_traces += 1
        graph.num_traces += 1
        graph.step, graph.evaluations = None, 1
        keep_freed_blocks()  # a graph frees all its memory at its end, and allocates it again
        modules = evaluation.modules()
        statements = poutine.trace(param_only=True)
        try:
            with (
                without_side_effects(modules), as_written(modules), poutine.block(), statements,
                pyro.validation_enabled(False),
            ):  # fmt: skip
                step = trace_step(evaluation.traced, evaluation.tensors(), self.backend)
        except NotTraceable as error:
            self._refuse(graph, str(error))
        except Exception as error:  # what make_fx cannot run can still be run
            first_line = (str(error).strip().splitlines() or [""])[0]
            self._refuse(graph, f"tracing it failed ({type(error).__name__}: {first_line})")
        else:
            stored = dict(pyro.get_param_store().named_parameters())
            names = statements.trace.nodes.keys() & stored.keys()
            graph.step, graph.parameters = step, {name: stored[name] for name in names}

    def _compare(self, graph: Graph, step: Step, evaluation: Evaluation) -> Tensor:
        """Evaluate the program, and compare the graph's outcome with it."""
        try:
            with without_side_effects(evaluation.modules(), step.written):
                outcome = step(evaluation.tensors())
                written = [tensor.clone() for tensor in step.written]
        except Exception as error:
            loss = evaluation.plain()  # which raises an error of its own for bad data
            self._refuse(graph, f"its graph cannot be run ({type(error).__name__}: {error})")
            return loss
        loss = evaluation.plain()
        if not loss.isfinite():
            graph.evaluations -= 1  # no comparison is possible; the next evaluation compares
            return loss
        gradients = torch.autograd.grad(loss, outcome.leaves, allow_unused=True)
        pairs = [(outcome.results[0], loss.detach(), evaluation.size(loss))]
        pairs += [
            (ours, theirs, theirs.norm())
            for ours, theirs in zip(outcome.gradients, gradients, strict=True)
            if theirs is not None
        ]
        for ours, theirs in zip(written, step.written, strict=True):
            pairs.append((ours, theirs, theirs.detach().float().norm()))
        if not all(agree(*pair) for pair in pairs):
            self._differ(graph, evaluation, float(outcome.results[0]), float(loss.detach()))
        return with_gradients(loss.detach(), gradients, outcome.leaves)

    def _differ(self, graph: Graph, evaluation: Evaluation, ours: float, theirs: float) -> None:
        """Trace the program again, unless its graph never agreed or it changes all the time."""
        if graph.evaluations == 2:
            self._refuse(
                graph,
                f"its graph gives a loss of {ours:.6g} and the program itself {theirs:.6g}, or "
                "another gradient: it computes with something other than tensors, such as numpy's "
                "or Python's random numbers or a counter",
            )
        elif graph.num_traces >= self.max_graphs:
            self._refuse(
                graph, f"what it reads was changed between evaluations {self.max_graphs} times"
            )
        else:
            self.warn(
                "traces the program again, since something that it reads (an attribute, a closure "
                "cell, a global) was changed between evaluations; up to half of the evaluations so "
                "far used the old value: pass what changes as an argument"
            )
            self._trace(graph, evaluation)


# ------------------------------------------------------------------------------ log densities


class CompiledDensity:
    """A scalar function of a vector and its gradient, as a graph that is traced once.

    ``CompiledLoss`` says when the program itself runs, and what it must be. The gradient is that in
    the vector and in parameters, and can be taken once. Calls under ``vmap``, ``torch.func.grad``,
    autocast or without gradients run the program itself.

    :param function: of a vector (P,), a scalar.
    :param model: the program, whose modules' buffers are restored after a trace.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], model: Any) -> None:
        self.function, self.model = function, model
        self.graphs = CompiledLoss("Program.compile")

    def __call__(self, vector: Tensor) -> Tensor:
        """The value at a vector, to be differentiated once."""
        if not torch.is_grad_enabled() or is_transformed() or castings():
            return self.function(vector)
        leaf = vector if vector.requires_grad else vector.detach().requires_grad_()
        outcome = self.graphs(_DensityEvaluation(self, leaf))
        return outcome if isinstance(outcome, Tensor) else outcome.differentiable()


class _DensityEvaluation(Evaluation):
    def __init__(self, density: CompiledDensity, vector: Tensor) -> None:
        self.density, self.vector = density, vector
        self.owner = density.model
        self.key = vector.shape, vector.dtype, vector.device

    def plain(self) -> Tensor:
        return self.density.function(self.vector)

    def tensors(self) -> list[Tensor]:
        return [self.vector]

    def traced(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (self.density.function(*tensors),)

    def modules(self) -> list[nn.Module]:
        return modules_of(self.density.model)

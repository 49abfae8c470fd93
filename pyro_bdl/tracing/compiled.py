"""Losses and log densities as graphs of torch's operators, run in place of the program and compared
with it now and then."""

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import pyro
import torch
from pyro import poutine
from pyro.poutine.runtime import am_i_wrapped
from torch import Tensor, nn

from pyro_bdl.errors import warn
from pyro_bdl.tracing.step import Outcome, StepGraph, agree, trace_step
from pyro_bdl.tracing.trace import NotTraceable
from pyro_bdl.utils.autograd import is_transformed, with_gradients, without_hooks
from pyro_bdl.utils.memory import keep_freed_blocks
from pyro_bdl.utils.module_state import Modules, changed, uncompiled, without_side_effects
from pyro_bdl.utils.one_thread import Hidden
from pyro_bdl.utils.precision import castings
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


# ------------------------------------------------------------------------------ attributes

_BOOKKEEPING = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
_WORDS = (bool, int, float, complex, str, bytes)
_MISSING = object()


class Attributes:
    """The attributes of modules, parts, parameters, buffers and hooks among them, so that one that
    is set between evaluations is noticed.

    Numbers and words are compared by value, all else by identity. Modes are left out.

    :param moving: names of attributes that are left out, since they change from step to step.
    """

    def __init__(self, modules: Iterable[nn.Module], moving: Collection[str]) -> None:
        self.moving = moving
        self.dicts: list[tuple[nn.Module, dict[str, Any]]] = []
        for module in modules:
            own = vars(module)
            self.dicts += [(module, own), *((module, own[n]) for n in _BOOKKEEPING if n in own)]
        self.left_out: set[tuple[int, str]] = set()  # a dict's number, and what a run sets in it
        self._read()

    def _read(self) -> None:
        self.before, self._readers = [], []
        for number, (_, values) in enumerate(self.dicts):
            chosen = {n: v for n, v in values.items() if not self._is_left_out(number, n)}
            self.before.append(chosen)
            whole = len(chosen) == len(values)
            if chosen:
                read = values.values if whole else partial(map, values.get, [*chosen])
                self._readers.append(read)
        self._tables = [values for _, values in self.dicts]
        self._lengths = [*map(len, self._tables)]
        self._values = list(chain.from_iterable(values.values() for values in self.before))

    def _is_left_out(self, number: int, name: str) -> bool:
        return name in self.moving or (number, name) in self.left_out

    def changed(self) -> str | None:
        """An attribute that was set since the last call, with its module; None if none was."""
        present = chain.from_iterable(map(operator.call, self._readers))
        same_lengths = [*map(len, self._tables)] == self._lengths
        if same_lengths and all(map(operator.is_, present, self._values)):
            return None
        number, name = next(self._changes(), (0, ""))
        self._read()  # modes may have changed, too
        return f"{type(self.dicts[number][0]).__name__}.{name}" if name else None

    def leave_out_changes(self) -> None:
        """Leave out what was set since the last call: by a run of the program itself."""
        self.left_out.update(self._changes())
        self._read()

    def _changes(self) -> Iterator[tuple[int, str]]:
        for number, ((_, values), before) in enumerate(zip(self.dicts, self.before, strict=True)):
            for name in dict.fromkeys((*before, *values)):
                old, new = before.get(name, _MISSING), values.get(name, _MISSING)
                same = old is new or (
                    type(old) is type(new) and isinstance(old, _WORDS) and old == new
                )
                if not same and name != "training" and not self._is_left_out(number, name):
                    yield number, name


# ---------------------------------------------------------------------------------- graphs

_SOON = 16  # evaluations after a change of an attribute, within which another one counts


class Evaluation(Protocol):
    """One evaluation of a loss that can run plainly or as a graph.

    :ivar owner: the program (and guide) that is evaluated.
    :ivar key: what a graph depends on besides the values of tensors and the modules' modes: shapes,
        dtypes, devices, arguments that are not tensors.
    :ivar holders: what is known of the program's modules, see ``module_state.changed``.
    """

    owner: Hashable
    key: Hashable
    holders: tuple

    def plain(self) -> Tensor:
        """Run the program; return its loss."""

    def tensors(self) -> Sequence[Tensor]:
        """The arguments of the graph."""

    def traced(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The loss and further results as a function of ``tensors``, to be traced."""

    def size(self, loss: Tensor) -> Tensor:
        """The number that errors of the loss are compared with, by default its absolute value."""
        return loss.detach().abs()


@dataclass
class Graph:
    """The graph of one kind of evaluations; ``step`` is None where the program runs uncompiled.

    :param parameters: those in Pyro's store that it reads, by name.
    :param evaluations: how often the loss was evaluated since it was traced or a training began,
        that time included.
    :param agreed: whether a comparison with the program has found it right.
    """

    step: StepGraph | None = None
    parameters: dict[str, Tensor] = field(default_factory=dict)
    evaluations: int = 0
    num_traces: int = 0
    agreed: bool = False

    def is_due(self) -> bool:
        """Return whether this evaluation is compared with the program: 2, 4, 8, ..."""
        return self.evaluations.bit_count() == 1

    def reads_current_tensors(self) -> bool:
        """Return whether Pyro's store still holds the same tensors, all leaves are trained, and
        the tensors that the graph takes for constants were not changed in place."""
        assert self.step is not None
        stored = dict(pyro.get_param_store().named_parameters())
        return (
            all(stored.get(name) is value for name, value in self.parameters.items())
            and all(leaf.requires_grad for leaf in self.step.leaves if isinstance(leaf, Tensor))
            and self.step.has_its_constants()
        )


@dataclass
class Owner:
    """A program (and guide), which graphs copy.

    :param modules: its modules, as far as evaluations have met them.
    :param attributes: their attributes since its graphs were traced; None without graphs.
    :param evaluations: how often the loss was evaluated since an attribute was set.
    :param changes: how often an attribute was set soon after another one.
    """

    modules: Modules
    attributes: Attributes | None = None
    evaluations: int = 0
    changes: int = 0


class CompiledLoss:
    """A loss whose evaluations run as graphs, one for each key and modes of the modules.

    The first evaluation runs the program and traces it (``make_fx``). Evaluations 2, 4, 8, ... run
    program and graph with the same random numbers, and compare loss and gradients; the others run
    the graph alone. Graphs are traced anew where an attribute of the program's modules was set (a
    number, a word, a part, a buffer; ``update_prior``) or a constant tensor was changed in place.
    The contract: what else the program reads does not change between evaluations. Where a
    comparison shows that it did, the program is traced again, with a warning.

    :param subject: the name that warnings begin with.
    :param backend: of ``pyro_bdl.tracing.step.BACKENDS``.
    :param max_graphs: the largest number of keys of one owner, of traces of one key, and of changes
        of attributes in quick succession; beyond it the program runs uncompiled.
    :param moving: names of attributes of modules that change from step to step.
    """

    def __init__(
        self,
        subject: str,
        backend: str = "eager",
        max_graphs: int = 8,
        moving: Collection[str] = (),
    ) -> None:
        self.subject, self.backend, self.max_graphs = subject, backend, max_graphs
        self.moving = frozenset(moving)
        self.num_traces = 0  # times that a program was traced
        self.num_replays = 0  # evaluations that ran only a graph
        self.graphs: dict[tuple[Hashable, Hashable, Hashable], Graph] = {}
        self._owners: dict[Hashable, Owner] = {}
        self._warned: set[str] = set()

    def emptied(self) -> "CompiledLoss":
        """One with these options and without graphs, for copies."""
        return CompiledLoss(self.subject, self.backend, self.max_graphs, self.moving)

    def begin(self) -> None:
        """Begin the comparisons anew, with the next evaluation, as at the start of a training."""
        for graph in self.graphs.values():
            graph.evaluations = min(graph.evaluations, 1)

    def __call__(self, evaluation: Evaluation) -> Tensor | Outcome:
        """Return the plain loss, or the outcome of a graph."""
        owner = self._owners.get(evaluation.owner)
        if owner is None:
            owner = self._owners[evaluation.owner] = Owner(Modules(*evaluation.holders))
        owner.evaluations += 1
        attribute = None if owner.attributes is None else owner.attributes.changed()
        if attribute is not None:
            self._drop(owner, evaluation.owner, attribute)
        if owner.changes >= self.max_graphs:
            return evaluation.plain()
        graph = self.graphs.get(self._key(owner, evaluation))
        if graph is None:
            return self._new(owner, evaluation)
        if graph.step is None:
            return evaluation.plain()
        if not graph.reads_current_tensors():
            loss = evaluation.plain()
            self._trace(owner, graph, evaluation)
            return loss
        graph.evaluations += 1
        if graph.is_due():
            return self._compare(owner, graph, graph.step, evaluation)
        self.num_replays += 1
        if am_i_wrapped():  # tell SVI which parameters to optimize
            with torch.no_grad():
                for name in graph.parameters:
                    pyro.param(name)
        return graph.step(evaluation.tensors())

    def _key(self, owner: Owner, evaluation: Evaluation) -> tuple[Hashable, Hashable, Hashable]:
        modes = tuple([module.training for module in owner.modules])
        return evaluation.owner, evaluation.key, modes

    def _new(self, owner: Owner, evaluation: Evaluation) -> Tensor:
        """Run the program, which shows its modules, and trace it."""
        if not self._has_room(evaluation.owner):
            return evaluation.plain()
        known = len(owner.modules)
        with changed(lambda module, args: None, owner.modules):
            loss = evaluation.plain()
        if len(owner.modules) > known:  # graphs so far do not know them
            self._drop(owner, evaluation.owner)
        graph = self.graphs[self._key(owner, evaluation)] = Graph()
        self._trace(owner, graph, evaluation)
        return loss

    def _drop(self, owner: Owner, name: Hashable, attribute: str | None = None) -> None:
        """Drop the graphs of an owner, since an attribute was set, or since it has more modules."""
        self.graphs = {key: graph for key, graph in self.graphs.items() if key[0] != name}
        owner.attributes = None
        if attribute is None:
            return
        owner.changes = owner.changes + 1 if owner.evaluations < _SOON else 0
        owner.evaluations = 0
        if owner.changes >= self.max_graphs:
            self.warn(
                f"runs the program uncompiled, since '{attribute}' is set between evaluations "
                "again and again: pass what changes as an argument, as a tensor"
            )

    def warn(self, reason: str) -> None:
        """Warn once that a program runs uncompiled, or that its graph was stale."""
        if reason not in self._warned:
            self._warned.add(reason)
            warn(f"{self.subject} {reason}", "uncompiled")

    def _has_room(self, owner: Hashable) -> bool:
        """Return whether there is room for another graph; drop one of another owner if need be."""
        if len(self.graphs) < self.max_graphs:
            return True
        others = [key for key in self.graphs if key[0] != owner]
        if others:
            del self.graphs[others[0]]
            used = {owner, *(key[0] for key in self.graphs)}
            self._owners = {name: o for name, o in self._owners.items() if name in used}
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

    def _trace(self, owner: Owner, graph: Graph, evaluation: Evaluation) -> None:
        self.num_traces += 1
        graph.num_traces += 1
        graph.step, graph.evaluations, graph.agreed = None, 1, False
        keep_freed_blocks()  # a graph frees all its memory at its end, and allocates it again
        modules = owner.modules
        if owner.attributes is None:
            owner.attributes = Attributes(modules, self.moving)
        statements = poutine.trace(param_only=True)
        try:
            with (
                without_side_effects(modules), uncompiled(modules), Hidden(), statements,
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
        owner.attributes.leave_out_changes()

    def _compare(
        self, owner: Owner, graph: Graph, step: StepGraph, evaluation: Evaluation
    ) -> Tensor:
        """Evaluate the program, and compare the graph's outcome with it."""
        try:
            with without_side_effects(owner.modules, step.written):
                outcome = step(evaluation.tensors())
                written = [tensor.clone() for tensor in step.written]
        except Exception as error:
            loss = evaluation.plain()  # which raises an error of its own for bad data
            self._refuse(graph, f"its graph cannot be run ({type(error).__name__}: {error})")
            return loss
        loss = evaluation.plain()
        assert owner.attributes is not None
        owner.attributes.leave_out_changes()
        if not loss.isfinite():
            graph.evaluations -= 1  # no comparison is possible; the next evaluation compares
            return loss
        with without_hooks(outcome.leaves):
            gradients = torch.autograd.grad(loss, outcome.leaves, allow_unused=True)
        result = with_gradients(loss.detach(), gradients, outcome.leaves)
        if not all(g.norm().isfinite() for g in gradients if g is not None):
            graph.evaluations -= 1
            return result
        pairs = [(outcome.results[0], loss.detach(), evaluation.size(loss))]
        pairs += [
            (ours, theirs, theirs.norm())
            for ours, theirs in zip(outcome.gradients, gradients, strict=True)
            if theirs is not None
        ]
        for ours, theirs in zip(written, step.written, strict=True):
            pairs.append((ours, theirs, theirs.detach().float().norm()))
        if all(agree(*pair) for pair in pairs):
            graph.agreed = True
        else:
            losses = float(outcome.results[0]), float(loss.detach())
            self._differ(owner, graph, evaluation, losses)
        return result

    def _differ(
        self, owner: Owner, graph: Graph, evaluation: Evaluation, losses: tuple[float, float]
    ) -> None:
        """Trace the program again, unless its graph never agreed or it changes all the time.

        :param losses: the graph's and the program's.
        """
        if not graph.agreed:
            self._refuse(
                graph,
                "its graph gives a loss of {:.6g} and the program itself {:.6g}, or "
                "another gradient: it computes with something other than tensors, such as numpy's "
                "or Python's random numbers or a counter".format(*losses),
            )
        elif graph.num_traces >= self.max_graphs:
            self._refuse(
                graph, f"what it reads was changed between evaluations {self.max_graphs} times"
            )
        else:
            self.warn(
                "traces the program again, since something that it reads (a closure cell, a "
                "global, an attribute of an object that is no module) was changed between "
                "evaluations; up to half of the evaluations so far used the old value: pass what "
                "changes as an argument"
            )
            self._trace(owner, graph, evaluation)


# ------------------------------------------------------------------------------ log densities


class CompiledDensity:
    """A scalar function of a vector and its gradient, as a graph that is traced once.

    ``CompiledLoss`` says when the program itself runs, and what it must be. The gradient is that in
    the vector and in parameters, and can be taken once. Calls under ``vmap``, ``torch.func.grad``,
    autocast or without gradients run the program itself.

    :param function: of a vector (P,), a scalar.
    :param modules: the program's modules, whose buffers are restored after a trace.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], modules: Modules) -> None:
        self.function, self.modules = function, modules
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
        self.owner, self.holders = density, (density.modules,)
        self.key = vector.shape, vector.dtype, vector.device

    def plain(self) -> Tensor:
        return self.density.function(self.vector)

    def tensors(self) -> list[Tensor]:
        return [self.vector]

    def traced(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (self.density.function(*tensors),)

    def size(self, loss: Tensor) -> Tensor:
        """The density may be zero by chance, and is of the order of the number of latents."""
        return loss.detach().abs() + self.vector.numel()

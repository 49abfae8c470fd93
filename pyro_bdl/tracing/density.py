"""A program's log density as a graph of torch's operators, with its gradient."""

from typing import TYPE_CHECKING, Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyro_bdl.tracing.guards import Guards, Snapshot
from pyro_bdl.tracing.step import Outcome, Step, agree, size_of, trace_step
from pyro_bdl.tracing.trace import NotTraceable
from pyro_bdl.utils.autocast import castings
from pyro_bdl.utils.autograd import is_transformed
from pyro_bdl.utils.module_state import as_written, modules_of
from pyro_bdl.utils.side_effects import without_side_effects

if TYPE_CHECKING:
    from collections.abc import Callable

_CHECKED = 2  # evaluations that are compared with the program
_MOST_TRACES = 8


class CompiledDensity:
    """A scalar function of a vector and its gradient, as a graph that is traced once.

    The first call runs and traces the program, the first two calls compare graph and program; later
    ones run the graph alone, without the cost of Python, Pyro and autograd. The gradient is that
    in the vector and in parameters, and can be taken once. Parameters and buffers may change in
    place; if attributes of the program's modules or variables of its functions change, it is traced
    again. Vectors of another shape or dtype, and calls under ``vmap``, ``torch.func.grad`` or
    without gradients run the program itself.

    ``refused`` says why the program cannot be traced, and so is run at every call: control flow or
    shapes that depend on the vector, numbers from outside torch, side effects. It is None where the
    program can be traced.

    :param function: of a vector (P,), a scalar.
    :param model: the program, whose modules and variables are guarded.
    """

    def __init__(self, function: "Callable[[Tensor], Tensor]", model: Any) -> None:
        self.function, self.model = function, model
        self.refused: str | None = None
        self.num_traces = 0
        self._step: Step | None = None
        self._guards: Guards
        self._like: tuple[Any, ...] = ()
        self._left = _CHECKED

    def __call__(self, vector: Tensor) -> Tensor:
        """The value at a vector, to be differentiated once."""
        elsewhere = is_transformed() or bool(castings())
        if self.refused is not None or not torch.is_grad_enabled() or elsewhere:
            return self.function(vector)
        if self._step is None or self._guards.broken() is not None:
            self._trace(vector)
        if self._step is None or self._like != _kind(vector):
            return self.function(vector)
        if self._left:
            return self._compared(self._step, vector)
        return self._step((vector,)).differentiable()

    def _trace(self, vector: Tensor) -> None:
        self._step, self._left, self._like = None, _CHECKED, _kind(vector)
        self.num_traces += 1
        if self.num_traces > _MOST_TRACES:
            self.refused = f"its modules or variables changed {_MOST_TRACES} times"
            return
        modules = modules_of(self.model)
        snapshot = Snapshot((self.model,), modules)

        def value(vector: Tensor) -> tuple[Tensor]:
            with pyro.validation_enabled(False):
                return (self.function(vector),)

        statements = poutine.trace(param_only=True)
        try:
            with without_side_effects(modules), as_written(modules), poutine.block(), statements:
                step = trace_step(value, [vector.detach().requires_grad_()], "eager")
            change = snapshot.change()
            if change is not None:
                raise NotTraceable(f"a run changes the attribute '{change.key}' of {change.kind}")
        except NotTraceable as error:
            self.refused = str(error)
            return
        except Exception as error:  # what make_fx cannot run can still be run
            self.refused = f"tracing it failed ({type(error).__name__}: {error})"
            return
        stored = pyro.get_param_store()._params
        parameters = {name: stored[name] for name in statements.trace.nodes if name in stored}
        self._guards = Guards((self.model,), modules, parameters, step.parameters, step.constants)
        self._step = step

    def _compared(self, step: Step, vector: Tensor) -> Tensor:
        """The program's own value; a graph that gives another one is not used again."""
        try:
            with without_side_effects(modules_of(self.model), step.written):
                outcome = step((vector,))
        except RuntimeError as error:  # the gradient of a recurrent layer on a CPU
            self.refused, self._step = f"its graph does not run ({error})", None
            return self.function(vector)
        exact = self.function(vector)
        if not exact.isfinite():
            return exact  # the next call compares
        self._left -= 1
        if not self._is_same(outcome, exact):
            self.refused = (
                "its graph gives other numbers than the program: it computes with something other "
                "than tensors, such as random numbers of numpy or Python"
            )
            self._step = None
        return exact

    def _is_same(self, outcome: Outcome, exact: Tensor) -> bool:
        pairs = [(outcome.results[0], exact.detach())]
        places = [n for n, leaf in enumerate(outcome.leaves()) if leaf.requires_grad]
        if places:
            leaves = [outcome.leaves()[n] for n in places]
            found = torch.autograd.grad(exact, leaves, retain_graph=True, allow_unused=True)
            gradients = zip(places, found, strict=True)
            pairs += [(outcome.gradients[n], g) for n, g in gradients if g is not None]
        return all(agree(ours, theirs, size_of(theirs)) for ours, theirs in pairs)


def _kind(vector: Tensor) -> tuple[Any, ...]:
    return vector.shape, vector.dtype, vector.device

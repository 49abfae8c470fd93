"""The compiled ELBO: the program and its gradient are traced once, then their graph is run."""

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import torch
from pyro.infer import ELBO
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor

from pyro_bdl.elbo.finite_loss import check_value, guarded, left_to_caller, require_gradients
from pyro_bdl.elbo.graph import Graph, Pair
from pyro_bdl.elbo.tempered import (
    Temperature,
    TemperedTrace_ELBO,
    TemperedTraceMeanField_ELBO,
    check_data,
)
from pyro_bdl.errors import BdlWarning
from pyro_bdl.estimators.per_datum import active
from pyro_bdl.tracing.arguments import Given, read
from pyro_bdl.tracing.backends import BACKENDS
from pyro_bdl.tracing.step import Outcome, agree, block_sums, size_of
from pyro_bdl.tracing.trace import NotTraceable
from pyro_bdl.utils.autocast import castings
from pyro_bdl.utils.autograd import is_transformed, with_gradients
from pyro_bdl.utils.memory import keep_freed_blocks
from pyro_bdl.utils.side_effects import without_side_effects
from pyro_bdl.utils.validation import check_temperature


class CompiledELBO(ELBO):
    """-L(eta) of ``TemperedTraceMeanField_ELBO`` and its gradient, as a graph that is traced once.

    A drop-in replacement in ``pyro.infer.SVI`` and in torch's loops. It draws the same random
    numbers, has the same attributes after a step (``expected_log_likelihood``, ``kl``,
    ``temperature``, ``step``), and its losses agree up to rounding.

    For each shape of the arguments, the first step runs, checks and traces the program
    (``make_fx``). The second step runs program and graph and compares them. Later steps run only
    the graph, without the cost of Python, Pyro and autograd. Temperature, arguments, parameters and
    random numbers, including the indices of subsampled plates, are new in each run.

    Control flow may ask for truth values of the arguments alone, such as whether an attention mask
    is full: each answer has a graph of its own.

    The program is traced again for other shapes, dtypes and devices of the arguments, and for other
    values of arguments that are not tensors. It is also traced again if attributes of modules
    change (modes, numbers, replaced tensors), or variables that the program's functions use:
    closure cells, globals, entries of dicts, attributes of objects. Changes inside lists and other
    containers are not noticed.

    A program that cannot be traced runs uncompiled, with a warning that says why: other control
    flow or shapes that depend on values of tensors, random numbers from outside torch, or side
    effects in Python. Steps without gradients, such as ``loss``, run uncompiled without a warning.
    Steps under ``torch.autocast`` have graphs of their own; the bounds say what is cast.

    :param temperature: see ``TemperedTraceMeanField_ELBO``, which also explains ``num_particles``
        and the ``options``.
    :param bound: the class of the ELBO to compile, ``TemperedTraceMeanField_ELBO`` or
        ``TemperedTrace_ELBO``.
    :param backend: "eager" runs the graph's operators one by one. "inductor" compiles kernels,
        which are faster still, but take seconds to a minute for each shape, and need a C++ compiler
        (on the CPU) or Triton.
    :param max_graphs: the largest number of argument shapes to compile, and of traces of a changed
        program; beyond it the program runs uncompiled.
    :param options: arguments of the bound: ``cold_temperature``, ``estimator``,
        ``sticking_the_landing``.
    :raises ValueError: for an unknown backend, ``max_graphs`` below 1, or options that the bound
        refuses.
    :raises TypeError: for another class of bound, or an ELBO in the place of its arguments.
    """

    def __init__(
        self,
        temperature: Temperature = 1.0,
        num_particles: int = 1,
        *,
        bound: type[TemperedTrace_ELBO] = TemperedTraceMeanField_ELBO,
        backend: str = "eager",
        max_graphs: int = 8,
        **options: Any,
    ) -> None:
        if isinstance(temperature, ELBO):
            name = type(temperature).__name__
            raise TypeError(
                f"CompiledELBO takes the arguments of an ELBO, not an ELBO, got {name}(...): call "
                "CompiledELBO(temperature, num_particles, bound=TemperedTrace_ELBO)"
            )
        if bound not in (TemperedTrace_ELBO, TemperedTraceMeanField_ELBO):
            raise TypeError(
                "bound must be TemperedTraceMeanField_ELBO or TemperedTrace_ELBO, got "
                f"{getattr(bound, '__name__', bound)}: use that one uncompiled"
            )
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if max_graphs < 1:
            raise ValueError(f"max_graphs must be at least 1, got {max_graphs}")
        self.bound = bound(temperature, num_particles, **options)
        super().__init__(num_particles=num_particles)
        self.backend = backend
        self.max_graphs = max_graphs
        self.num_traces = 0  # times that the program was traced
        self.num_replays = 0  # steps that ran only a graph
        self._graphs: dict[tuple, Graph] = {}
        self._eta: tuple[float, Tensor] | None = None
        self._warned_reasons: set[str] = set()

    # Values of the last step

    @property
    def step(self) -> int:
        """The number of steps taken, which is the position in the temperature's schedule."""
        return self.bound.step

    @step.setter
    def step(self, value: int) -> None:
        self.bound.step = value

    @property
    def num_particles(self) -> int:
        """Draws per step."""
        return self.bound.num_particles

    @num_particles.setter
    def num_particles(self, value: int) -> None:
        self.bound.num_particles = value

    @property
    def temperature(self) -> float:
        """The temperature of the last step."""
        return self.bound.temperature

    @property
    def kl(self) -> Tensor | None:
        """KL(q || p) of the last step in nats, a detached scalar."""
        return self.bound.kl

    @property
    def expected_log_likelihood(self) -> Tensor | None:
        """E_q[log p(y | w)] of the last step in nats, a detached scalar."""
        return self.bound.expected_log_likelihood

    # The loss

    def loss(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Return -L(eta) in nats at the current step's temperature, uncompiled, without counting a
        step."""
        return self.bound.loss(model, guide, *args, **kwargs)

    def loss_and_grads(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Return -L(eta) in nats and add its gradients to the parameters' gradients."""
        require_gradients()
        pair = Pair(model, guide, args, kwargs)
        with left_to_caller():  # the number is read here on every device
            outcome = self._take(pair)
        loss = outcome if isinstance(outcome, Tensor) else outcome.results[0]
        value = check_value(loss.item(), partial(check_data, model, guide, args, kwargs))
        if not isinstance(outcome, Tensor):
            if outcome.add_gradients():
                return value
            loss = outcome.differentiable()
        if loss.requires_grad:
            loss.backward(retain_graph=self.retain_graph)
        return value

    def differentiable_loss(
        self, model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return -L(eta) as a tensor that can be differentiated once; counts as a step of the
        schedule."""
        outcome = self._take(Pair(model, guide, args, kwargs))
        if isinstance(outcome, Tensor):
            return outcome
        question = partial(check_data, model, guide, args, kwargs)
        return guarded(outcome.differentiable(), question)

    def _take(self, pair: Pair) -> Tensor | Outcome:
        """Take a step; return the bound's loss, or the outcome of a graph."""
        if not torch.is_grad_enabled() or is_transformed():
            return self._plain(pair)
        try:
            given = read(pair.args, pair.kwargs)
        except NotTraceable as error:
            self._warn(str(error))
            return self._plain(pair)
        key: tuple[Any, ...] = (
            pair.model, pair.guide, getattr(pair.model, "training", None),
            getattr(pair.guide, "training", None), given.kind, active(), castings(),
            self.num_particles, self.bound.estimator, getattr(pair.guide, "keeps_noise", False),
        )  # fmt: skip
        graph = self._graphs.get(key)
        while graph is not None and (truths := graph.truths(given)) is not None:
            key = (*key, truths)
            graph = self._graphs.get(key)
        if graph is None:
            if not self._make_room(pair):
                return self._plain(pair)
            graph = self._graphs[key] = Graph()
        if graph.step is None:
            loss = self._plain(pair)
            if graph.refused is None:
                self._trace(graph, pair, given)
            return loss
        change = graph.guards.broken()
        if change is not None:
            loss = self._plain(pair)
            self._trace_again(graph, pair, given, change)
            return loss
        if not graph.is_checked:
            return self._compare(graph, pair, given)
        return self._replay(graph, pair, given)

    def _plain(self, pair: Pair) -> Tensor:
        return self.bound.differentiable_loss(pair.model, pair.guide, *pair.args, **pair.kwargs)

    def _replay(self, graph: Graph, pair: Pair, given: Given) -> Outcome:
        bound, step = self.bound, graph.step
        assert step is not None
        bound.batches.report()
        temperature = check_temperature(bound.schedule(bound.step))
        arguments = (*given.tensors, self._as_tensor(temperature))
        try:
            outcome = step(arguments)
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                check_data(pair.model, pair.guide, pair.args, pair.kwargs)
            raise
        bound.temperature = temperature
        _, bound.expected_log_likelihood, bound.kl, *noise = outcome.results
        if graph.keeps_noise:
            pair.guide.last_noise = noise[0] if noise else None
        if _PYRO_STACK:
            with torch.no_grad():
                for name in graph.guards.parameters:
                    pyro.param(name)  # tells SVI which parameters to optimize
        bound.step += 1
        self.num_replays += 1
        return outcome

    def _as_tensor(self, temperature: float) -> Tensor:
        """The temperature as a scalar of the KL's dtype, since float64 would promote the loss."""
        assert self.kl is not None
        if self._eta is None or self._eta[0] != temperature or self._eta[1].dtype != self.kl.dtype:
            value = torch.tensor(temperature, dtype=self.kl.dtype, device="cpu")
            self._eta = temperature, value
        return self._eta[1]

    # Graphs

    def _make_room(self, pair: Pair) -> bool:
        """If there are too many graphs, drop a graph of another program or guide.

        :returns: whether there is room for another graph.
        """
        if len(self._graphs) < self.max_graphs:
            return True
        others = [key for key in self._graphs if key[:2] != (pair.model, pair.guide)]
        if others:
            del self._graphs[others[0]]
            return True
        self._warn(
            f"its arguments come in more than {self.max_graphs} shapes or with more than "
            f"{self.max_graphs} values of other arguments; the first ones stay compiled: pad the "
            "arguments, pass numbers as tensors, or raise max_graphs"
        )
        return False

    def _trace(self, graph: Graph, pair: Pair, given: Given) -> None:
        self.num_traces += 1
        keep_freed_blocks()  # a graph frees all its memory at its end, and allocates it again
        try:
            graph.make(self.bound, self.backend, pair, given, self._as_tensor(self.temperature))
        except NotTraceable as error:
            graph.refuse(str(error))
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            graph.refuse(f"tracing it failed ({type(error).__name__}: {lines[0]})")
        if graph.refused is not None:
            self._warn(graph.refused)

    def _trace_again(self, graph: Graph, pair: Pair, given: Given, change: str) -> None:
        graph.changes += 1
        if graph.changes < self.max_graphs:
            self._trace(graph, pair, given)
            return
        graph.refuse(
            f"{change} was changed between steps, as something was {self.max_graphs} times by now, "
            "and each change asks for a new trace"
        )
        self._warn(str(graph.refused))

    def _compare(self, graph: Graph, pair: Pair, given: Given) -> Tensor:
        """Take a step of the bound, and check the graph's outcome against it."""
        step, bound = graph.step, self.bound
        assert step is not None
        temperature = check_temperature(bound.schedule(bound.step))
        arguments = (*given.tensors, self._as_tensor(temperature))
        try:
            with without_side_effects(pair.modules(), step.written):
                outcome = step(arguments)
                written = [tensor.clone() for tensor in step.written]
                leaves, value = outcome.leaves(), outcome.results[0]
                ours = [block_sums(gradient) for gradient in outcome.gradients]
                del outcome  # before the program's own step, which needs as much memory
        except Exception as error:
            graph.refuse(f"its graph cannot be run ({type(error).__name__}: {error})")
            self._warn(str(graph.refused))
            return self._plain(pair)
        loss = self._plain(pair)
        if not loss.isfinite():
            return loss  # no comparison is possible; the next step compares
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        loss = with_gradients(loss.detach(), gradients, leaves)
        assert self.kl is not None and self.expected_log_likelihood is not None
        size = self.expected_log_likelihood.abs() + temperature * self.kl.abs()
        pairs = [(value, loss.detach(), size)]
        for sums, gradient in zip(ours, gradients, strict=True):
            if gradient is not None:
                theirs = block_sums(gradient)
                pairs.append((sums, theirs, size_of(theirs)))
        pairs += [(a, b, size_of(b)) for a, b in zip(written, step.written, strict=True)]
        graph.is_checked = all(agree(*three) for three in pairs)
        if not graph.is_checked:
            graph.refuse(
                f"its graph gives a loss of {value:.6g} and the program itself "
                f"{loss.detach():.6g}, or another gradient: it computes with something other "
                "than tensors, such as numpy's or Python's random numbers or a counter"
            )
            self._warn(str(graph.refused))
        return loss

    def _warn(self, reason: str) -> None:
        if reason not in self._warned_reasons:
            self._warned_reasons.add(reason)
            warnings.warn(
                f"CompiledELBO runs the program uncompiled, since {reason}",
                BdlWarning,
                stacklevel=6,
            )

    def _get_trace(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Any:
        return self.bound._get_trace(model, guide, args, kwargs)  # required by Pyro's base class

    def __getstate__(self) -> dict[str, Any]:
        """The state without graphs: copies begin without them."""
        return self.__dict__ | {"_graphs": {}}

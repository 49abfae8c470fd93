"""The compiled ELBO: the program and its gradient are traced once, then their graph is run."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.elbo.checks import check_data
from pyro_bdl.elbo.step import Step, Terms
from pyro_bdl.elbo.tempered import Temperature, TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.estimators.per_datum import active
from pyro_bdl.guides.base import SET_BY_STEPS, Guide
from pyro_bdl.tracing.compiled import Arguments, CompiledLoss, Evaluation, split
from pyro_bdl.tracing.step import BACKENDS, Outcome
from pyro_bdl.tracing.trace import NotTraceable
from pyro_bdl.utils.autograd import is_transformed
from pyro_bdl.utils.precision import castings
from pyro_bdl.utils.validation import one_of, real_number, whole_number

_WORTH_TRACING = 100  # steps: tracing a graph takes as long as it saves in these


class CompiledELBO(TemperedTrace_ELBO):
    """-L(eta) of ``TemperedTraceMeanField_ELBO`` and its gradient, as a graph that is traced once.

    A drop-in replacement in ``pyro.infer.SVI`` and in torch's loops. It draws the same random
    numbers, has the same attributes after a step (``expected_log_likelihood``, ``kl``,
    ``temperature``, ``step``), and its losses agree up to rounding.

    For each shape of the arguments, the first step runs, checks and traces the program
    (``make_fx``). Steps 2, 4, 8, ... run program and graph with the same noise and compare loss and
    gradients. The other steps run only the graph, without the cost of Python, Pyro and autograd.
    Temperature, arguments, parameters and random numbers, including the indices of subsampled
    plates, are new in each run. Other shapes, dtypes, devices, values of arguments that are not
    tensors, and ``train()`` or ``eval()`` of any module of program or guide have graphs of their
    own. Where an attribute of these modules was set (``num_data``, the ``p`` of dropout, a layer, a
    hook, ``update_prior``), or a tensor in a closure was changed in place, the next step traces
    again. ``training.train`` begins with a comparison.

    The contract: what else the program reads (numbers in closures and globals, objects that are no
    modules) stays as it is between steps. The next comparison notices a change, warns of it, and
    traces the program again.

    A program that cannot be traced runs uncompiled, with a warning that says why: control flow or
    shapes that depend on values of tensors, or random numbers from outside torch. Steps without
    gradients, such as ``loss``, run uncompiled without a warning. Steps under ``torch.autocast``
    have graphs of their own; the bounds say what is cast.

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
    :raises TypeError: for another class of bound.
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
        if bound not in (TemperedTrace_ELBO, TemperedTraceMeanField_ELBO):
            raise TypeError(
                "bound must be TemperedTraceMeanField_ELBO or TemperedTrace_ELBO, got "
                f"{getattr(bound, '__name__', bound)}: use that one uncompiled"
            )
        one_of(backend, "backend", BACKENDS)
        max_graphs = whole_number(max_graphs, "max_graphs")
        self.closed_forms = bound.closed_forms
        super().__init__(temperature, num_particles, **options)
        self.graphs = CompiledLoss(type(self).__name__, backend, max_graphs, SET_BY_STEPS)

    @property
    def num_traces(self) -> int:
        """The number of times that a program was traced."""
        return self.graphs.num_traces

    @property
    def num_replays(self) -> int:
        """The number of steps that ran only a graph."""
        return self.graphs.num_replays

    def begin_training(self) -> None:
        """Compare graph and program at the next step, and at steps 2, 4, 8, ... from there."""
        self.graphs.begin()

    def take_step(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> Step:
        """Take a step, by the program or by a graph; see ``TemperedTrace_ELBO.take_step``."""
        if not torch.is_grad_enabled() or is_transformed():
            return super().take_step(model, guide, *args, **kwargs)
        self._begin(model, guide, args, kwargs)
        try:
            arguments = split(args, kwargs)
        except NotTraceable as error:
            self.graphs.warn(f"runs the program uncompiled, since {error}")
            return self.plain_step(model, guide, args, kwargs)
        evaluation = _Evaluation(self, model, guide, arguments)
        try:
            outcome = self.graphs(evaluation)
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                check_data(model, guide, args, kwargs)
            raise
        if isinstance(outcome, Tensor):
            assert evaluation.step is not None
            return replace(evaluation.step, value=outcome)
        return evaluation.finish(outcome)

    def __getstate__(self) -> dict[str, Any]:
        """The state without graphs: copies begin without them."""
        return super().__getstate__() | {"graphs": self.graphs.emptied()}


def bound_for(steps: int, **options: Any) -> TemperedTraceMeanField_ELBO | CompiledELBO:
    """Return the bound of a training, as a graph where its steps are worth tracing one.

    :param options: of either bound.
    """
    kind = CompiledELBO if steps >= _WORTH_TRACING else TemperedTraceMeanField_ELBO
    return kind(**options)


class _Evaluation(Evaluation):
    """A step of a bound: the program and the guide at these arguments."""

    step: Step | None = None  # of the plain program, once it has run

    def __init__(
        self, bound: TemperedTrace_ELBO, model: Callable, guide: Any, arguments: Arguments
    ) -> None:
        self.bound, self.model, self.guide, self.arguments = bound, model, guide, arguments
        self.owner = self.holders = model, guide
        self.key = arguments.key, active(), castings(), bound.num_particles, bound.estimator
        self.temperature = real_number(bound.schedule(bound.step), "temperature")
        self.numbers: list[tuple[Guide, dict[str, float]]] = []

    def plain(self) -> Tensor:
        args, kwargs = self.arguments.rebuild(self.arguments.tensors)
        self.step = self.bound.plain_step(self.model, self.guide, args, kwargs)
        return self.step.value

    def tensors(self) -> list[Tensor]:
        self.numbers = [(part, numbers) for part in self.bound.parts if (numbers := part.numbers())]
        moving = self.temperature, *chain(*(numbers.values() for _, numbers in self.numbers))
        assert self.bound.kl is not None  # a step of the bound came before
        # of the KL's dtype, since float64 would promote the loss
        scalars = torch.tensor(moving, dtype=self.bound.kl.dtype, device="cpu")
        return [*self.arguments.tensors, *scalars.unbind()]

    def traced(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(self.arguments.tensors)
        args, kwargs = self.arguments.rebuild(tensors[:count])
        temperature, *numbers = tensors[count:]
        left = iter(numbers)
        bound = self.bound
        with contextlib.ExitStack() as stack:
            for part, names in self.numbers:
                stack.enter_context(part.at_parameters({name: next(left) for name in names}))
            terms = bound.terms(self.model, self.guide, args, kwargs)
        loss = bound.negative_bound(terms, temperature)
        return loss, *(part for part in terms if part is not None)

    def size(self, loss: Tensor) -> Tensor:
        """The likelihood and the KL, whose difference the loss is, in absolute value."""
        bound = self.bound
        assert bound.kl is not None and bound.expected_log_likelihood is not None
        return bound.expected_log_likelihood.abs() + self.temperature * bound.kl.abs()

    def finish(self, outcome: Outcome) -> Step:
        """The step of a graph's results, taken as the bound takes its own."""
        loss, terms = outcome.results[0], Terms(*outcome.results[1:])
        step = self.bound.record_terms(terms, loss, self.temperature)
        self.bound.skip(1)
        return replace(step, outcome=outcome)

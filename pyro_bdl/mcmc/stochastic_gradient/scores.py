"""Log densities and gradients of several chains at once, from a traced graph if possible."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.program.batches import Batch
from pyro_bdl.program.vmap import DrawMap
from pyro_bdl.tracing.compiled import Arguments, split
from pyro_bdl.tracing.step import agree, compiled
from pyro_bdl.tracing.trace import NotTraceable
from pyro_bdl.utils.random_state import own_randomness

_MOST_GRAPHS = 4


class Scores:
    """Values (chains,) and gradients (chains, p) of a log density of (vector, *args, **kwargs).

    The program is evaluated by ``vmap``, or chain by chain if an operator has no batching rule. The
    Python code in a run (handlers, distributions, modules) costs as much as the arithmetic of a
    small network. The operators are therefore traced once for each shape of a batch, and the graph
    is replayed. The program itself is run at every call if it cannot be traced, or if the graph
    gives other results on its first batch. This is settled at the first batch of a shape, without a
    random number of the chains: results do not depend on the calls before.

    :param log_density: a scalar function in nats, pure in the vector and the arguments.
    :param traced: whether to trace at all.
    """

    def __init__(self, log_density: Callable[..., Tensor], *, traced: bool = True) -> None:
        self.log_density, self.traced = log_density, traced
        self.map = DrawMap()
        self.graphs: dict[Any, Callable[..., Any] | None] = {}

    def __call__(self, vectors: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        if not self.traced:
            return self._run(vectors, batch)
        try:
            arguments = split(*batch)
        except NotTraceable:  # a program that cannot be traced can still be run
            return self._run(vectors, batch)
        if arguments.key not in self.graphs:
            room = len(self.graphs) < _MOST_GRAPHS
            with own_randomness():
                self.graphs[arguments.key] = self._graph(vectors, arguments) if room else None
        graph = self.graphs[arguments.key]
        if graph is None:
            return self._run(vectors, batch)
        with torch.no_grad():
            return graph(vectors, *arguments.tensors)

    def _run(self, vectors: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        args, kwargs = batch

        def density(draw: dict[str, Tensor]) -> Tensor:
            return self.log_density(draw["u"], *args, **kwargs)

        # The chains are independent, so the gradient of the sum gives each chain's gradient.
        leaf = vectors.detach().requires_grad_()
        with torch.enable_grad():
            values = self.map(density, {"u": leaf})
            (gradient,) = torch.autograd.grad(values.sum(), leaf)
        return values.detach(), gradient

    def _graph(self, vectors: Tensor, arguments: Arguments) -> Callable[..., Any] | None:
        """The graph, if there is one that gives the program's results here."""

        def scores(vectors: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            return self._run(vectors, arguments.rebuild(tensors))

        inputs = [vectors, *arguments.tensors]
        try:
            run, outside, *_ = compiled(scores, inputs)
        except (NotTraceable, RuntimeError):
            return None

        def graph(*tensors: Tensor) -> tuple[Tensor, ...]:
            return run(*tensors, *outside)

        with torch.no_grad():
            results = graph(*inputs)
        pairs = zip(results, scores(*inputs), strict=True)
        return graph if all(agree(ours, exact, exact.norm()) for ours, exact in pairs) else None

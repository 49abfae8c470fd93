"""Log densities and gradients of several chains at once, from a traced graph if possible."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.program.batches import Batch
from pyro_bdl.program.vmap import DrawMap
from pyro_bdl.tracing.trace import trace
from pyro_bdl.utils.module_state import vmappable
from pyro_bdl.utils.random_state import fixed_normal, own_randomness
from pyro_bdl.utils.trees import tree_flatten, tree_unflatten

_ASIDE = 0.1  # how far from the chains a graph is compared with the program a second time
_TOLERANCE = 1e-3  # relative to the largest entry; float32 sums depend on their order


class Scores:
    """Values (chains,) and gradients (chains, p) of a log density of (vector, *args, **kwargs).

    The program is evaluated by ``vmap``, or chain by chain if an operator has no batching rule. The
    Python code in a run (handlers, distributions, modules) costs as much as the arithmetic of a
    small network. The operators are therefore traced once for each shape of a batch, and the graph
    is replayed. The program itself is run at every call if it cannot be traced, or if the graph
    gives other results on its first batch (control flow, random numbers). This is settled at the
    first batch of a shape, without a random number of the chains: results do not depend on the
    calls before.

    :param log_density: a scalar function in nats, pure in the vector and the arguments.
    :param traced: whether to trace at all.
    :param most_graphs: the largest number of batch shapes that are traced.
    """

    def __init__(
        self, log_density: Callable[..., Tensor], *, traced: bool = True, most_graphs: int = 4
    ) -> None:
        self.log_density = log_density
        self.most_graphs = most_graphs
        self.traced = traced
        self.map = DrawMap()
        self.graphs: dict[Any, _Graph | None] = {}

    def __call__(self, vectors: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        leaves, structure = tree_flatten(batch)
        if not self.traced:
            return self._run(vectors, batch)
        key = (structure, *(_kind(leaf) for leaf in leaves))
        if key not in self.graphs:
            room = len(self.graphs) < self.most_graphs
            with own_randomness():
                self.graphs[key] = self._checked(vectors, batch) if room else None
        graph = self.graphs[key]
        return self._run(vectors, batch) if graph is None else graph(vectors, leaves)

    def _checked(self, vectors: Tensor, batch: Batch) -> "_Graph | None":
        """The graph, if it gives the program's results at and beside these vectors."""
        leaves, structure = tree_flatten(batch)
        graph = self._recorded(vectors, leaves, structure)
        if graph is not None:
            for at in (vectors, vectors + _ASIDE * fixed_normal(vectors)):
                if not all(map(_agree, graph(at, leaves), self._run(at, batch))):
                    return None
        return graph

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

    def _recorded(self, vectors: Tensor, leaves: list[Any], structure: Any) -> "_Graph | None":
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def scores(vectors: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            whole = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                whole[place] = tensor
            args, kwargs = tree_unflatten(whole, structure)

            def density(vector: Tensor) -> Tensor:
                return self.log_density(vector, *args, **kwargs)

            both = torch.func.grad_and_value(density)
            if len(vectors) == 1:
                gradient, value = both(vectors[0])
                return value[None], gradient[None]
            gradients, values = torch.func.vmap(both, randomness="different")(vectors)
            return values, gradients

        try:
            with vmappable():
                graph = trace(scores, [vectors, *(leaves[place] for place in places)])
        except Exception:  # a program that cannot be traced can still be run
            return None
        return _Graph(graph, places)


class _Graph:
    """A traced graph, and the places of its arguments."""

    def __init__(self, graph: Callable[..., Any], places: list[int]) -> None:
        self.graph, self.places = graph, places

    @torch.no_grad()
    def __call__(self, vectors: Tensor, leaves: list[Any]) -> tuple[Tensor, Tensor]:
        return self.graph(vectors, *(leaves[place] for place in self.places))


def _kind(leaf: Any) -> Any:
    """The properties of an argument for which a traced graph is valid."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return type(leaf), repr(leaf)


def _agree(found: Tensor, exact: Tensor) -> bool:
    scale = exact.abs().max()
    return bool(((found - exact).abs() <= _TOLERANCE * scale).all()) or not bool(scale.isfinite())

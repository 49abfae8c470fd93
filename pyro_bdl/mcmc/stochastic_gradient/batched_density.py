"""Log densities and their gradients of several chains at once, traced once where that can be."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_bdl.program.batches import Batch
from pyro_bdl.program.vmap import DrawMap
from pyro_bdl.tracing.trace import trace
from pyro_bdl.utils.module_state import vmappable
from pyro_bdl.utils.random_state import everywhere

_MOST_GRAPHS = 4  # of batches that differ in shape
_CHECKED = 2  # evaluations of a graph that are held against the program
_TOLERANCE = 1e-3  # relative to the largest entry; single precision reorders sums


class Scores:
    """Values (chains,) and gradients (chains, p) of a log density of (vector, *args, **kwargs).

    By ``vmap`` through the program; where an operator has no batching rule, chain by chain. What
    Python does in a run of the program (handlers, distributions, modules) costs as much as the
    arithmetic of a small network: so the operators are recorded once for each shape of a batch and
    replayed. The program is run again at every call where it cannot be recorded, and where the
    recording gives something else on one of its first batches (control flow, random numbers).

    :param log_density: a scalar function, pure in the vector and the arguments.
    :param traced: whether to record at all.
    """

    def __init__(self, log_density: Callable[..., Tensor], *, traced: bool = True) -> None:
        self.log_density = log_density
        self.traced = traced
        self.map = DrawMap()
        self.graphs: dict[Any, _Graph | None] = {}

    def __call__(self, vectors: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        leaves, structure = tree_flatten(batch)
        if not self.traced:
            return self._run(vectors, batch)
        key = (structure, *(_kind(leaf) for leaf in leaves))
        if key not in self.graphs:
            room = len(self.graphs) < _MOST_GRAPHS
            self.graphs[key] = self._recorded(vectors, leaves, structure) if room else None
        graph = self.graphs[key]
        if graph is None:
            return self._run(vectors, batch)
        found = graph(vectors, leaves)
        if graph.calls <= _CHECKED:
            exact = self._run(vectors, batch)
            if not all(map(_agree, found, exact)):
                self.graphs[key] = None
            return exact
        return found

    def _run(self, vectors: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        args, kwargs = batch

        def density(draw: dict[str, Tensor]) -> Tensor:
            return self.log_density(draw["u"], *args, **kwargs)

        # The chains do not touch each other: the gradient of their sum is each one's own.
        leaf = vectors.detach().requires_grad_()
        with torch.enable_grad(), everywhere():
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
        except Exception:  # whatever the program does that cannot be recorded, it can be run
            return None
        return _Graph(graph, places)


class _Graph:
    """A recording, and how often it was played."""

    def __init__(self, graph: Callable[..., Any], places: list[int]) -> None:
        self.graph, self.places = graph, places
        self.calls = 0

    @torch.no_grad()
    def __call__(self, vectors: Tensor, leaves: list[Any]) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return self.graph(vectors, *(leaves[place] for place in self.places))


def _kind(leaf: Any) -> Any:
    """The properties of an argument that a recording holds for."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return type(leaf), repr(leaf)


def _agree(found: Tensor, exact: Tensor) -> bool:
    scale = exact.abs().max()
    return bool(((found - exact).abs() <= _TOLERANCE * scale).all()) or not bool(scale.isfinite())

"""Autograd's graph: which tensors a result depends on, and results with known gradients."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.autograd.graph import get_gradient_edge

from pyro_bdl.utils.trees import tensors_in

_Edge = tuple[Any, int]  # a node of the graph, and the number of one of its results


def reaches(value: Tensor, tensors: Iterable[Tensor]) -> bool:
    """Return whether gradients of ``value`` flow to any of the tensors, whether or not they are
    leaves."""
    if not value.requires_grad:
        return False
    wanted = {_edge(tensor) for tensor in tensors if tensor.requires_grad}
    return any(edge in wanted for edge in _edges(value))


def wants_gradients(*trees: Any) -> bool:
    """Return whether gradients are enabled and a tensor in trees of arguments requires them."""
    tensors = tensors_in(trees)
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def has_own_functions(values: Iterable[Tensor]) -> bool:
    """Return whether a ``torch.autograd.Function`` of somebody's own is behind tensors: autograd
    may leave its part out of second derivatives, and say nothing."""
    return any(isinstance(n, BackwardCFunction) for value in values for n in nodes_behind(value))


def leaves_behind(value: Tensor, stop: Iterable[Tensor] = ()) -> list[Tensor]:
    """The leaf tensors to which ``value.backward()`` would give a gradient.

    :param stop: tensors at which the search ends.
    """
    return [node.variable for node in nodes_behind(value, stop) if hasattr(node, "variable")]


def nodes_behind(value: Tensor, stop: Iterable[Tensor] = ()) -> Iterator[Any]:
    """The nodes of autograd's graph that computed a tensor, its own first.

    :param stop: tensors at which the search ends.
    """
    return (node for node, _ in _edges(value, stop))


def passed_by(
    values: Iterable[Tensor], tensors: Mapping[str, Tensor], gates: Mapping[str, Collection[Any]]
) -> set[str]:
    """Return the names of tensors to which gradients of values flow through none of their gates.

    :param gates: gradient edges (node, number), by name.
    """
    ends = {_edge(value) for value in values if value.requires_grad}
    results: dict[Any, list[_Edge]] = {}  # of a node, those that the values are computed from
    users: dict[_Edge, list[Any]] = {}  # the nodes that computed with a result
    seen, pending = set(), [*ends]
    while pending:
        edge = pending.pop()
        if edge[0] is None or edge in seen:
            continue
        seen.add(edge)
        if edge[0] not in results:
            for other in edge[0].next_functions:
                users.setdefault(other, []).append(edge[0])
                pending.append(other)
        results.setdefault(edge[0], []).append(edge)

    def has_way(tensor: Tensor, gate: Collection[Any]) -> bool:
        pending, closed = [_edge(tensor)], {*gate}
        while pending:
            edge = pending.pop()
            if edge in closed:
                continue
            if edge in ends:
                return True
            closed.add(edge)
            pending += [result for node in users.get(edge, ()) for result in results[node]]
        return False

    return {name for name, tensor in tensors.items() if has_way(tensor, gates.get(name, ()))}


def with_gradients(
    value: Tensor, gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> Tensor:
    """A scalar with known gradients in ``leaves``; it can be differentiated once.

    :param value: the scalar's value.
    :param gradients: one for each leaf, with the leaf's shape; None where there is none.
    """
    return _WithGradients.apply(value, list(gradients), *leaves)


@contextmanager
def without_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Leave out the hooks of leaf tensors, which ``torch.autograd.grad`` calls too: they are called
    where the gradients are added to those of the leaves."""
    hooks = [leaf._backward_hooks for leaf in leaves if leaf._backward_hooks]
    before = [dict(own) for own in hooks]
    try:
        for own in hooks:
            own.clear()
        yield
    finally:
        for own, functions in zip(hooks, before, strict=True):
            own.update(functions)


def have_hooks(leaves: Iterable[Tensor]) -> bool:
    """Return whether a leaf has a hook that is called with its gradient."""
    return any(leaf._backward_hooks or leaf._post_accumulate_grad_hooks for leaf in leaves)


@torch.no_grad()
def add_gradients(leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add known gradients to those of leaves, as ``backward`` does, and call the leaves' hooks."""
    if have_hooks(leaves):
        torch.autograd.backward(leaves, gradients)
        return
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if leaf.grad is None:
            leaf.grad = gradient.clone()  # several may share memory
        else:
            leaf.grad.add_(gradient)


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor | None], *leaves: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple:  # type: ignore[override]
        scaled = [None if g is None else upstream.to(g) * g for g in ctx.gradients]
        return None, None, *scaled


def _edges(value: Tensor, stop: Iterable[Tensor] = ()) -> Iterator[_Edge]:
    """The edges of the graph that computed a tensor, its own first."""
    if not value.requires_grad:
        return
    seen = {_edge(tensor) for tensor in stop if tensor.requires_grad}
    pending = [_edge(value)]
    while pending:
        edge = pending.pop()
        if edge[0] is None or edge in seen:
            continue
        seen.add(edge)
        yield edge
        pending += edge[0].next_functions


def _edge(tensor: Tensor) -> _Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def is_transformed() -> bool:
    """Return whether the call is inside vmap or a trace."""
    return is_mapped() or torch._C._len_torch_dispatch_stack() > 0


def is_mapped() -> bool:
    """Return whether the call is inside vmap, or another transform of ``torch.func``."""
    return torch._C._are_functorch_transforms_active()

"""A loss and its gradient as one graph, and as a function that autograd knows."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_bdl.tracing.backends import BACKENDS, Run
from pyro_bdl.tracing.graph import lift, without_kept_text
from pyro_bdl.tracing.linear_sums import join_linear
from pyro_bdl.tracing.simplify import LARGE, simplify
from pyro_bdl.tracing.trace import (
    NotTraceable,
    TruthValues,
    mutated,
    tensor_of,
    trace,
    variable_nodes,
)
from pyro_bdl.utils.autocast import rounding, without_autocast, without_cached_casts
from pyro_bdl.utils.autograd import leaves_behind, with_gradients

_BLOCK = 64
Loss = Callable[..., tuple[Tensor, ...]]


@dataclass
class Step:
    """The graph of (loss, further results, gradients).

    :param run: a function of the arguments, followed by ``outside``.
    :param outside: the tensors that are not arguments: parameters and constants.
    :param constants: the tensors whose functions were computed once.
    :param written: the tensors that are changed in place.
    :param leaves: the tensors in which gradients are taken: parameters, and arguments by their
        position.
    :param others: the number of further results.
    :param truths: the truth values of the arguments for which it holds.
    """

    run: Run
    outside: tuple[Tensor, ...]
    constants: list[Tensor]
    written: list[Tensor]
    leaves: list[Tensor | int]
    others: int
    truths: TruthValues

    @property
    def parameters(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def __call__(self, arguments: Sequence[Tensor]) -> "Outcome":
        with torch.no_grad(), without_autocast():  # the graph holds the casts
            results = self.run(*arguments, *self.outside)
        return Outcome(self, arguments, results[: 1 + self.others], results[1 + self.others :])


class Outcome(NamedTuple):
    """The results of one run of a graph.

    :param results: the loss and further results, detached.
    :param gradients: of the loss in the leaves.
    """

    step: Step
    arguments: Sequence[Tensor]
    results: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]

    def leaves(self) -> list[Tensor]:
        return [self.arguments[n] if isinstance(n, int) else n for n in self.step.leaves]

    def differentiable(self) -> Tensor:
        """The loss, to be differentiated once."""
        return with_gradients(self.results[0], self.gradients, self.leaves(), owned=self._owned())

    def _owned(self) -> set[int]:
        """The positions of large gradients that share memory with no other tensor of the run.

        They need not be copied. Small ones are copied in less time than this is found out.
        """
        large = [n for n, gradient in enumerate(self.gradients) if gradient.numel() > LARGE]
        if not large:
            return set()
        tensors = (*self.results, *self.gradients, *self.arguments, *self.step.outside)
        uses = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors)
        return {n for n in large if uses[self.gradients[n].untyped_storage().data_ptr()] == 1}

    def add_gradients(self) -> bool:
        """Add the gradients to the parameters' gradients, as ``backward`` does.

        :returns: False, without any change, if hooks wait for ``backward``.
        """
        for leaf in self.step.leaves:
            if isinstance(leaf, int) or leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                return False
        owned = self._owned()
        with torch.no_grad():
            pairs = zip(self.step.parameters, self.gradients, strict=True)
            for number, (leaf, gradient) in enumerate(pairs):
                if leaf.grad is None:
                    leaf.grad = gradient if number in owned else gradient.clone()
                else:
                    leaf.grad.add_(gradient)
        return True


@without_kept_text()
def trace_step(loss: Loss, examples: Sequence[Tensor], backend: str, *, readable: int = 0) -> Step:
    """Trace a loss and its gradient.

    :param loss: from tensors to the loss, a scalar, and further results.
    :param examples: of the tensors; those that require a gradient get one.
    :param backend: of ``BACKENDS``.
    :param readable: of how many of the tensors, from the first on, truth values may be asked.
    :raises NotTraceable: if the graph would not stand for the loss, or for one without gradient.
    """
    arguments = [e.detach().requires_grad_(e.requires_grad) for e in examples]
    leaves: list[Tensor] = []
    others = 0

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal others
        value, *rest = loss(*tensors)
        others = len(rest)
        found = leaves_behind(value)
        if not found:
            raise NotTraceable("its loss depends on no parameter")
        with without_autocast():
            gradients = torch.autograd.grad(value, found, allow_unused=True)
        pairs = [(a, g) for a, g in zip(found, gradients, strict=True) if g is not None]
        leaves[:] = [leaf for leaf, _ in pairs]
        return value.detach(), *[r.detach() for r in rest], *[g for _, g in pairs]

    with without_cached_casts():
        graph = trace(function, arguments, readable=readable)
    truths = TruthValues(graph, arguments, readable)
    written = list({id(t): t for t in (tensor_of(graph, n) for n in mutated(graph))}.values())
    variable = {tensor_of(graph, n) for n in variable_nodes(graph) if n.op == "get_attr"}
    attributes = {n: tensor_of(graph, n) for n in graph.graph.find_nodes(op="get_attr")}
    inputs = lift(graph.graph, attributes)
    known = {node: tensor for node, tensor in inputs.items() if tensor not in variable}
    constants = list(known.values())  # including those of which only a number was read
    simplify(graph.graph, known)
    join_linear(graph.graph)
    inputs |= lift(graph.graph, {n: t for n, t in known.items() if n.op != "placeholder"})
    for node in [node for node in inputs if not node.users]:
        graph.graph.erase_node(node)
        del inputs[node]
    graph.recompile()
    outside = tuple(inputs.values())
    with without_autocast():
        run = BACKENDS[backend](graph, [*arguments, *outside])
    places = {id(argument): number for number, argument in enumerate(arguments)}
    where = [places.get(id(leaf), leaf) for leaf in leaves]
    return Step(run, outside, constants, written, where, others, truths)


def block_sums(tensor: Tensor) -> Tensor:
    """A tensor to compare in place of another: itself, or if it is large, the sums of blocks."""
    if tensor.numel() <= LARGE:
        return tensor
    flat = tensor.detach().reshape(-1)
    whole = len(flat) - len(flat) % _BLOCK
    return torch.cat([flat[:whole].view(-1, _BLOCK).sum(1), flat[whole:]])


def size_of(tensor: Tensor) -> Tensor:
    """The norm of a tensor, to which errors are compared."""
    return tensor.norm() if tensor.is_floating_point() else tensor.new_zeros(())


def agree(a: Tensor, b: Tensor, size: Tensor) -> bool:
    """Return whether two tensors agree to half of their digits, relative to ``size``; under
    autocast, to half of the digits that are computed with."""
    if not b.is_floating_point():
        return torch.equal(a, b)
    error = (a - b).norm()
    return bool(error <= max(torch.finfo(b.dtype).eps, rounding()) ** 0.5 * size)

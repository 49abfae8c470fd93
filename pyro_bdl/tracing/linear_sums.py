"""Sums of the results of one linear operator, computed by applying it once: f(a) + f(b) = f(a + b).

Backward passes are full of such sums. A tensor that each step of a chain reads has a gradient from
each of them, which went through the same operators.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from pyro_bdl.tracing.graph import base, changed, kind_of, name_of

aten = torch.ops.aten
# Larger results cost more to add than to pass through an operator one by one.
MOST_NUMBERS = 2**12

# The places of the arguments in which an operator is linear.
_LINEAR = {
    "sum": (0,), "neg": (0,), "view": (0,), "reshape": (0,), "unsqueeze": (0,), "squeeze": (0,),
    "transpose": (0,), "permute": (0,), "expand": (0,), "select_backward": (0,),
    "slice_backward": (0,), "_softmax_backward_data": (0,), "_log_softmax_backward_data": (0,),
    "mul": (0, 1), "div": (0,),
}  # fmt: skip


def join_linear(graph: fx.Graph) -> None:
    """Apply linear operators once to the sum of their arguments, in place.

    Rounding apart, the results are the same.
    """
    roots = {base(part) for node in graph.nodes for part in changed(node)}
    if roots:  # the order of reads matters
        return
    for node in reversed(list(graph.nodes)):
        if _is_sum(node) and not any(_continues(node, user) for user in node.users):
            terms = list(_terms(node))
            with graph.inserting_before(node):
                total = _joined(graph, terms)
            if total is not None:
                node.replace_all_uses_with(total)
                graph.eliminate_dead_code()


def _is_sum(node: Any) -> bool:
    """Return whether a node adds two tensors of its own shape and dtype."""
    if not isinstance(node, fx.Node) or name_of(node) != "add" or node.kwargs:
        return False
    return all(isinstance(part, fx.Node) and _are_alike([node, part]) for part in node.args)


def _continues(node: fx.Node, user: fx.Node) -> bool:
    return _is_sum(user) and len(node.users) == 1


def _terms(node: fx.Node) -> Iterable[fx.Node]:
    """The terms of a sum of sums, those that nothing else uses."""
    pending = [node]
    while pending:
        for part in reversed(pending.pop().args):
            assert isinstance(part, fx.Node)
            if _is_sum(part) and len(part.users) == 1:
                pending.append(part)
            else:
                yield part


def _are_alike(nodes: Iterable[fx.Node]) -> bool:
    """Return whether nodes have the same shape, dtype and device."""
    kinds = [kind_of(node) for node in nodes]
    first = kinds[0]
    return first is not None and all(
        kind is not None and kind[:1] == first[:1] and kind.dtype == first.dtype for kind in kinds
    )


def _forms(node: fx.Node) -> list[tuple[Any, ...]]:
    """For each place in which a node is linear the operator with its other arguments."""
    found = []
    for place in _LINEAR.get(name_of(node), ()):
        inside = node.args[place] if place < len(node.args) else None
        kind = kind_of(inside) if isinstance(inside, fx.Node) else None
        if kind is None or kind.shape.numel() > MOST_NUMBERS or len(node.users) != 1:
            continue
        others = repr([arg for n, arg in enumerate(node.args) if n != place])
        options = repr(sorted(node.kwargs.items()))
        found.append((node.target, place, others, options, kind.shape, kind.dtype))
    return found


def _joined(graph: fx.Graph, terms: list[fx.Node]) -> fx.Node | None:
    """The sum of terms with their common operators applied once; None where there are none."""
    counts = Counter(form for term in set(terms) for form in _forms(term))
    groups: dict[Any, list[fx.Node]] = {}
    for term in terms:
        forms = [form for form in _forms(term) if counts[form] > 1 and terms.count(term) == 1]
        groups.setdefault(max(forms, key=lambda f: counts[f], default=term), []).append(term)
    if all(len(group) == 1 for group in groups.values()):
        return None
    found = []
    for form, group in groups.items():
        if len(group) == 1 or isinstance(form, fx.Node):
            found += group
            continue
        target, place = form[:2]
        inner = [term.args[place] for term in group]
        total = _joined(graph, [t for node in inner for t in _split(node)]) or _sum(graph, inner)
        args = tuple(total if n == place else arg for n, arg in enumerate(group[0].args))
        target = aten.reshape.default if target is aten.view.default else target
        node = graph.call_function(target, args, dict(group[0].kwargs))
        node.meta.update(group[0].meta)
        found.append(node)
    return _sum(graph, found)


def _split(node: Any) -> list[fx.Node]:
    return list(_terms(node)) if _is_sum(node) and len(node.users) == 1 else [node]


def _sum(graph: fx.Graph, terms: list[Any]) -> fx.Node:
    total = terms[0]
    for term in terms[1:]:
        added = graph.call_function(aten.add.Tensor, (total, term))
        added.meta.update(term.meta)
        total = added
    return total

"""The log densities of the statements of one run, like statements by one operation."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.contrib.discrete.enumeration import Statement
from pyro_bdl.distributions.parameters import (
    base_distribution,
    constants_of,
    is_known,
    parameters_of,
    rebuilt,
)


def log_densities(statements: Iterable[Statement]) -> dict[str, Tensor]:
    """log p of each statement at its value, not scaled and not masked.

    Statements of one family and shape, as the steps of a hidden Markov chain, are computed
    together.
    """
    result: dict[str, Tensor] = {}
    alike: dict[Any, list[Statement]] = {}
    for statement in statements:
        alike.setdefault(_form(statement), []).append(statement)
    for form, group in alike.items():
        if form is None or len(group) == 1:
            result |= {s.name: s.site.distribution.log_prob(s.site.value) for s in group}
        else:
            result |= zip([s.name for s in group], _together(group), strict=True)
    return result


def _form(statement: Statement) -> Any:
    """Equal for statements whose densities one operation can compute; None where that would cost
    more memory than the densities one by one."""
    site = statement.site
    fn: Any = site.distribution
    if statement.kind not in ("observed", "latents") or not isinstance(site.value, Tensor):
        return None
    base, tensors = base_distribution(fn), parameters_of(fn)
    if not is_known(fn) or any("." in name for name in tensors):
        return None
    numbers = fn.batch_shape.numel() * fn.event_shape.numel()
    for tensor in tensors.values():
        if tensor.shape[: len(fn.batch_shape)] != fn.batch_shape or tensor.numel() > numbers:
            return None
    values = {**tensors, "value": site.value}
    shapes = tuple((name, t.shape, t.dtype, t.device) for name, t in values.items())
    return type(base), tuple(constants_of(base).items()), fn.batch_shape, fn.event_shape, shapes


def _together(statements: Sequence[Statement]) -> Sequence[Tensor]:
    """log p of statements of one form at their values, of parameters and values stacked."""
    first: Any = statements[0].site.distribution
    tensors = [parameters_of(statement.site.distribution) for statement in statements]
    values = [statement.site.value for statement in statements]
    batch, of_values = len(first.batch_shape), values[0].dim() - first.event_dim

    def stacked(parts: Sequence[Tensor], rank: int) -> Tensor:
        together = torch.stack(list(parts))
        ones = (1,) * (max(batch, of_values) - rank)
        return together.reshape(together.shape[:1] + ones + together.shape[1:])

    parameters = {name: stacked([parts[name] for parts in tensors], batch) for name in tensors[0]}
    return rebuilt(first, parameters).log_prob(stacked(values, of_values)).unbind()

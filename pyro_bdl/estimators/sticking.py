"""Sticking the landing (Roeder, Wu & Duvenaud 2017): log q(w) without its score.

The gradient of -E_q[log q(w)] in the parameters of q has two terms: one through the draw w, and a
direct one, the score. The score has mean zero. Without it the gradient of log q(w) - log p(w, y)
vanishes at every draw if q is the posterior.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyro
from torch import nn


@contextmanager
def constant_parameters(guide: Callable) -> Iterator[None]:
    """Treat a guide's parameters, and those in Pyro's store, as constants inside the context."""
    own = guide.parameters() if isinstance(guide, nn.Module) else ()
    stored = (value for _, value in pyro.get_param_store().named_parameters())
    changed = [p for p in (*own, *stored) if p.requires_grad and p.is_leaf]
    try:
        for parameter in changed:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(True)

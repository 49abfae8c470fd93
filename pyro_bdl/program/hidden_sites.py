"""Latent sites that ``poutine.block`` hides from everything around a program."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyro
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.program import trace_once
from pyro_bdl.program.trace import is_deterministic
from pyro_bdl.utils.random_state import own_randomness


class _Blocks(Messenger):
    """Collects the blocks that stand between the program's statements and this handler."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[BlockMessenger] = []

    def _process_message(self, msg: Any) -> None:
        inner = _PYRO_STACK[_PYRO_STACK.index(self) + 1 :]
        known = {id(block) for block in self.found}
        self.found += [
            handler
            for handler in inner
            if isinstance(handler, BlockMessenger) and id(handler) not in known
        ]


@contextmanager
def _run_from_the_prior() -> Iterator[None]:
    """Own random numbers, and no checks of values, which a wide prior may make overflow."""
    with own_randomness(), pyro.validation_enabled(False):
        yield


def require_visible_latents(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Check that no latent is hidden: it would be drawn anew in each run, so that the program has
    no density that is a function of its latents.

    :raises UnsupportedProgramError: naming a latent that ``poutine.block`` hides.
    """
    blocks = _Blocks()

    def watched(*args: Any, **kwargs: Any) -> Any:
        with blocks:
            return model(*args, **kwargs)

    functools.update_wrapper(watched, model, assigned=(), updated=())  # errors name its arguments
    with _run_from_the_prior():
        visible = trace_once(watched, args, kwargs).nodes
    if not blocks.found:
        return
    saved = [block.hide_fn for block in blocks.found]
    try:
        for block in blocks.found:
            block.hide_fn = _hides_nothing
        with _run_from_the_prior():
            every = trace_once(model, args, kwargs).nodes
    finally:
        for block, hide_fn in zip(blocks.found, saved, strict=True):
            block.hide_fn = hide_fn
    for name, node in every.items():
        is_latent = node["type"] == "sample" and not node["is_observed"]
        if is_latent and name not in visible and not is_deterministic(node):
            raise UnsupportedProgramError(
                f"poutine.block hides the latent site '{name}', which each run draws anew, so that "
                "the program has no density: let it be seen, or give it a value with "
                "poutine.condition"
            )


def _hides_nothing(msg: Any) -> bool:
    return False

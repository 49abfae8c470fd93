"""Activation checkpointing in networks whose weights are substituted.

A checkpointed part is computed again in the backward pass, when the substitution is undone:
``checkpoint`` computes it with the same weights then. torch's own function would take the network's
stored weights, and is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.utils.autograd import is_transformed, nodes_behind
from pyro_bdl.utils.trees import tensors_in

_INSTEAD = (
    "torch.utils.checkpoint.checkpoint inside a network of bayesianize would compute the "
    "activations again with other weights: call pyro_bdl.nn.checkpoint in its place"
)

Substitution = Callable[[], AbstractContextManager]

# The substitution that holds, and the context in which torch's own checkpoints are refused.
_present: ContextVar[tuple[Substitution, ExitStack] | None] = ContextVar(
    "pyro_bdl_substitution", default=None
)


@contextmanager
def substituted(substitution: Substitution) -> Iterator[None]:
    """Run under ``substitution()``, which ``checkpoint`` takes up again in the backward pass."""
    with substitution(), ExitStack() as refusal:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            with suppress(RuntimeError):  # where hooks of the caller hold, as of save_on_cpu
                refusal.enter_context(disable_saved_tensors_hooks(_INSTEAD))
        token = _present.set((substitution, refusal))
        try:
            yield
        finally:
            _present.reset(token)


def checkpoint(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a part of a network whose activations are computed again in the backward pass.

    In place of ``torch.utils.checkpoint.checkpoint``, whose non-reentrant way it is, with the same
    weights both times. Inside ``vmap`` and other transforms of ``torch.func``, and in graphs, the
    activations are stored.

    :param function: the part.
    :param args: its arguments; keyword arguments that ``torch.utils.checkpoint`` has go there.
    """
    kwargs = {name: value for name, value in kwargs.items() if name != "use_reentrant"}
    present = _present.get()
    if present is None:
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
    if is_transformed():
        return function(*args)
    substitution, refusal = present
    refusal.close()

    def part(*args: Any) -> Any:
        with substitution():
            return function(*args)

    return torch_checkpoint.checkpoint(part, *args, use_reentrant=False, **kwargs)


def refuse_reentrant(outputs: Any) -> None:
    """Refuse outputs that torch's reentrant checkpoint computed.

    :raises UnsupportedProgramError: if one did.
    """
    tensors = tensors_in(outputs)
    names = {node.name() for tensor in tensors for node in nodes_behind(tensor)}
    if "CheckpointFunctionBackward" in names:
        raise UnsupportedProgramError(_INSTEAD)

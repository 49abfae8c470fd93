"""Refusal of networks whose parameters are in pieces on several processes."""

from collections.abc import Iterable

from torch import nn

from pyro_bdl.errors import UnsupportedProgramError


def refuse_sharded(modules: Iterable[nn.Module]) -> None:
    """Refuse parameters of FSDP and other sharded tensors (``DTensor``).

    :raises UnsupportedProgramError: naming the parameter.
    """
    for module in modules:
        wrapped = type(module).__name__ == "FullyShardedDataParallel"
        for name, parameter in module.named_parameters(recurse=False):
            if wrapped or hasattr(parameter, "device_mesh"):  # a DTensor's
                raise UnsupportedProgramError(
                    f"the parameter '{name}' of {type(module).__name__} is sharded over processes "
                    "(FSDP or DTensor), and a posterior needs whole weights: leave the network "
                    "whole and train on several processes by "
                    "pyro_bdl.distributed.DataParallel_ELBO, or if it does not fit, give a prior "
                    "to few of its weights (bdl.nn.lora, AutoLastLayer)"
                )

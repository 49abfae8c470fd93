"""The sites of a network's weights, their marks, and arguments of plates of networks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

INIT_KEY = "pyro_bdl_init"  # in a site's ``infer``: the value that the network has
OWNER_KEY = "pyro_bdl_owner"  # in a site's ``infer``: the module and attribute that hold that value


class SampledNetwork:
    """Base of modules that sample a network's weights.

    :param network: the network.
    :param site_prefix: the site of the parameter ``name`` is ``site_prefix + name``.
    :param sites: the names of the parameters that are sampled.
    """

    network: nn.Module
    site_prefix: str
    sites: Sequence[str]

    def check_layers(self) -> None:
        """Check that the network still has the layers whose weights are sampled."""


@dataclass(frozen=True)
class PerNetwork:
    """An argument that differs by network, see :func:`each`."""

    value: Any
    dim: int = 0


def each(value: Any, dim: int = 0) -> PerNetwork:
    """An argument of a plate of networks of which each network gets its own part.

    Network g gets ``value[g]``; all networks get the same of any other argument.

    :param value: a tensor with an entry for every network along ``dim``, or a dict, list or tuple
        of such. In a subsampled plate these are the networks of its indices: ``each(x[indices])``.
    :param dim: for several plates the first of their dimensions, which follow each other in the
        order of the plates' dims from left to right.
    """
    return PerNetwork(value, dim)

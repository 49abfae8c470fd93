"""Curvature structures by name; ``base.py`` defines their protocol."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pyro_bdl.curvature.structures.base import Structure, named
from pyro_bdl.curvature.structures.diagonal import Diagonal
from pyro_bdl.curvature.structures.full import Full
from pyro_bdl.curvature.structures.kernel import Kernel
from pyro_bdl.curvature.structures.kron.curvature import EKFAC, Kron
from pyro_bdl.curvature.structures.low_rank import LowRank
from pyro_bdl.curvature.structures.samples import Samples
from pyro_bdl.utils.validation import one_of

_KINDS = Kron, EKFAC, Full, Diagonal, LowRank, Kernel, Samples
STRUCTURES: Mapping[str, type[Structure]] = MappingProxyType({k().name: k for k in _KINDS})


@dataclass(frozen=True)
class Auto(Kron):
    """``structure="auto"``: chosen from the data, and Kronecker factors where no other fits."""

    name: str = named("auto")


def structure_of(value: Any) -> Structure:
    """The structure that a name, a mapping of its fields from a file, or itself stands for.

    :raises ValueError: for an unknown name.
    """
    if isinstance(value, Structure):
        return value
    kinds: dict[str, type[Structure]] = {**STRUCTURES, "auto": Auto}
    options = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = options.pop("name")
    return kinds[one_of(name, "structure", kinds)](**options)

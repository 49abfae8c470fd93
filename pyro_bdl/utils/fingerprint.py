"""What saved work is recognized by: settings, and numbers that program and data determine."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

_SAME = 1e-4  # relative: sums in float32 depend on the number of threads


def require_same(place: str, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Check that saved work is of a run with this run's fingerprint.

    :param place: the saved work in words, for errors.
    :param saved: its settings (numbers, strings, sequences) and arrays, such as log densities.
    :param ours: those of this run. Settings must be equal, arrays up to 1e-4 of their largest.
    :raises ValueError: if they differ, with the first name that does.
    """
    for name in {**saved, **ours}:
        theirs, own = saved.get(name), ours.get(name)
        if isinstance(own, np.ndarray | Tensor):
            if theirs is None or not _equal(np.asarray(theirs), np.asarray(own)):
                raise ValueError(
                    f"{place} is of another run (its {name} differ): it belongs to another "
                    "program, other data or other starts; give the same, or name another place"
                )
        elif theirs != own:
            raise ValueError(
                f"{place} is of a run with {name}={theirs!r}, and this one has {name}={own!r}: "
                "give the same, or name another place"
            )


def _equal(theirs: np.ndarray, own: np.ndarray) -> bool:
    if theirs.shape != own.shape:
        return False
    scale = np.abs(own[np.isfinite(own)]).max(initial=0.0)
    with np.errstate(invalid="ignore"):
        near = (theirs == own) | (np.abs(theirs - own) <= _SAME * scale)
    return bool((near | (np.isnan(theirs) & np.isnan(own))).all())

"""Files that are written completely or not at all, and what saved work is recognized by."""

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from pyro_bdl.utils.trees import equal_numbers
from pyro_bdl.utils.validation import as_path

_SAME = 1e-4  # relative: sums in float32 depend on the number of threads


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write to; it replaces ``path`` when the block ends.

    If the block raises, for example on a full disk or by Ctrl-C, ``path`` stays as it was. Missing
    folders are made. Special files such as /dev/stdout are written to directly.

    :param path: the file; symbolic links are followed.
    :raises IsADirectoryError: if the path is a folder.
    """
    path = as_path(path)
    if path.is_dir():
        raise IsADirectoryError(f"'{path}' is a folder: name a file, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        yield path
        return
    target = path.resolve()
    part = target.with_name(f".{target.stem}.{secrets.token_hex(4)}{target.suffix}")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


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
            # copies: torch warns of arrays that are read-only
            there, here = (v if isinstance(v, Tensor) else np.array(v) for v in (theirs, own))
            if theirs is None or not equal_numbers(there, here, _SAME):
                raise ValueError(
                    f"{place} is of another run (its {name} differ): it belongs to another "
                    "program, other data or other starts; give the same, or name another place"
                )
        elif theirs != own:
            raise ValueError(
                f"{place} is of a run with {name}={theirs!r}, and this one has {name}={own!r}: "
                "give the same, or name another place"
            )

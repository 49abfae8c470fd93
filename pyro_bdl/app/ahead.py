"""Fits that another process makes into the folder of results, where ``Fits`` finds them, and what
commands compile, kept in the user's cache folder."""

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import torch

from pyro_bdl.app.fits import Fits
from pyro_bdl.app.options import Options
from pyro_bdl.errors import BdlWarning
from pyro_bdl.utils.memory import available_memory

Split = tuple[int, int]  # the number of the repeat and of the fold
_BYTES = 3 * 2**30  # free memory beside which a process is started
_POSTERIORS = 4  # with fewer to fit, starting a process takes longer than it saves


class Ahead(contextlib.AbstractContextManager):
    """Another process that fits every second posterior, then the last half of the splits, while
    this one fits the rest.

    There is one where it pays: fits of the usual length, in one thread each, on another core. What
    it does not finish is left to the caller. The last posterior is the caller's, since the chains
    of NUTS take both cores once the other one is free.

    ``names`` are the posteriors and ``splits`` the splits that it fits.

    :param unfinished: the posteriors of the command that are still to fit.
    :param splits: those of ``--folds``.
    """

    def __init__(
        self, options: Options, unfinished: Sequence[str], splits: Sequence[Split]
    ) -> None:
        self.names: Sequence[str] = ()
        self.splits: Sequence[Split] = ()
        self._done = 0
        usual = options.settings().steps is None and torch.device(options.device).type == "cpu"
        free = available_memory(torch.device("cpu"))
        roomy = free is not None and free > _BYTES
        if not (usual and roomy and _cores() > 1 and torch.get_num_threads() == 1):
            return
        if len(unfinished) >= _POSTERIORS:
            self.names = unfinished[len(unfinished) % 2 :: 2]
        self.splits = splits[len(splits) // 2 :]
        if self.names or self.splits:
            command = [sys.executable, "-m", __name__]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._process.stdin is not None
            with self._process.stdin as pipe:
                job = replace(options, baselines=False), tuple(self.names), tuple(self.splits)
                pickle.dump(job, pipe)

    def wait(self, split: Split | None = None) -> None:
        """Wait until a split, by default the posteriors of the whole data, is fitted, or the
        process has ended; warn of what it warned of."""
        asked = [*([None] if self.names else []), *self.splits]
        while split in asked[self._done :]:
            assert self._process.stdout is not None
            try:
                messages = pickle.load(self._process.stdout)
            except EOFError:
                return
            self._done += 1
            for message in messages:
                warnings.warn(message, stacklevel=2)

    def __exit__(self, *error: object) -> None:
        if self.names or self.splits:
            self._process.terminate()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process.wait()


def _cores() -> int:
    """The cores that this process may use."""
    known = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


def main() -> None:
    """Make the fits that standard input names, without a word; write after the posteriors, and
    after each split, the warnings that the caller has not for itself."""
    options, names, splits = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(1)
    keep_compiled()
    logging.disable()
    jobs = [(options, place) for place in splits]
    if names:
        jobs.insert(0, (replace(options, guides=",".join(names), fresh=False), None))
    for chosen, place in jobs:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", BdlWarning)
            if place is None:
                data = chosen.load()
            else:
                data = chosen.load((place[1], chosen.folds), place[0])
            fits = Fits(chosen, data, shown=False)
            fits.fit_all()
        if fits.interrupted:
            return
        said = [each.message for each in caught] if place is None else []
        pickle.dump(said, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()


_KEPT = 2**28  # of the folder; those not used for longest go first
_SECONDS = 0.05  # of compilation that are worth a file


def keep_compiled() -> None:
    """Keep what this process compiles for later ones, in ``~/.cache/pyro_bdl/jax`` or the like
    under ``$XDG_CACHE_HOME``. JAX recognizes it by function, version and processor. A folder that
    was set before (``JAX_COMPILATION_CACHE_DIR``) stays."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir is not None:
        return
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "pyro_bdl" / "jax"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home
        return
    config.update("jax_compilation_cache_dir", str(folder))
    config.update("jax_compilation_cache_max_size", _KEPT)
    config.update("jax_persistent_cache_min_compile_time_secs", _SECONDS)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)

"""Splits that another process fits into the folder of results, where ``Fits`` finds them."""

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from pyro_bdl.app.compiled import keep_compiled
from pyro_bdl.app.fits import Fits
from pyro_bdl.app.options import Options
from pyro_bdl.utils.memory import available_memory

Split = tuple[int, int]  # the number of the repeat and of the fold
_BYTES = 3 * 2**30  # free memory beside which a process is started


class Ahead(contextlib.AbstractContextManager):
    """Another process that fits the last half of the splits while this one fits the rest.

    There is one where it pays: fits of the usual length, in one thread each, on another core. What
    it does not finish is left to the caller, and so is what there is to say of a fit.
    """

    def __init__(self, options: Options, splits: Sequence[Split]) -> None:
        self.splits: Sequence[Split] = ()
        usual = options.settings().steps is None and options.device == torch.device("cpu")
        free = available_memory(torch.device("cpu"))
        roomy = free is not None and free > _BYTES
        if not (usual and roomy and _cores() > 1 and torch.get_num_threads() == 1):
            return
        self.splits = splits[len(splits) // 2 :]
        if self.splits:
            command = [sys.executable, "-m", __name__]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
            assert self._process.stdin is not None
            with self._process.stdin as pipe:
                pickle.dump((replace(options, baselines=False), self.splits), pipe)

    def wait(self) -> None:
        """Wait until the process has ended."""
        if self.splits:
            self._process.wait()

    def __exit__(self, *error: object) -> None:
        if self.splits:
            self._process.terminate()
        self.wait()


def _cores() -> int:
    """The cores that this process may use."""
    known = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


def main() -> None:
    """Fit the splits that standard input names, without a word."""
    options, splits = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(1)
    keep_compiled()
    logging.disable()
    warnings.simplefilter("ignore")
    for repeat, fold in splits:
        fits = Fits(options, options.load((fold, options.folds), repeat), shown=False)
        fits.fit_all()
        if fits.interrupted:
            return


if __name__ == "__main__":
    main()

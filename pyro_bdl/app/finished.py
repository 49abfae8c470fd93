"""Finished posteriors in the folder of the results, from which the same command goes on."""

import json
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from pyro_bdl import posteriors
from pyro_bdl.comparison.evaluate import Evaluation
from pyro_bdl.data.dataset import Dataset
from pyro_bdl.guides.saved import load_posterior
from pyro_bdl.posteriors import Fit, Options, Problem
from pyro_bdl.samples import Samples
from pyro_bdl.utils.files import atomic_write
from pyro_bdl.utils.progress import logger
from pyro_bdl.version import __version__


def identity(data: Dataset, program: Mapping[str, str], settings: Options) -> dict[str, Any]:
    """Data, program and settings, which the posteriors of one command share.

    :param program: the program in words.
    """
    tensors = (data.x_train, data.y_train, data.x_test, data.y_test)
    found = {
        "version of pyro_bdl": __version__,
        "data": f"{len(data.x_train)} training and {len(data.x_test)} test rows of "
        f"{data.target_name}, {str(data.x_train.dtype).removeprefix('torch.')}, checksum "
        f"{_checksum(map(_bytes, tensors)):08x}",
    }
    return found | dict(program) | asdict(settings)


class Finished:
    """The finished fits of one command, in ``posteriors/CHECKSUM`` of the folder of its results.

    The checksum is that of the run: another command has a folder of its own there. A fit is the
    file of its posterior and, written last, ``NAME.json`` with its costs and the posterior's
    checksum; ``NAME.evaluation`` has its scores. A crash at any moment leaves the finished fits.

    :param folder: of the results.
    :param run: see ``identity``.
    :param fresh: remove the fits that are there.
    :raises OSError: if the folder cannot be written to.
    """

    def __init__(self, folder: Path, run: Mapping[str, Any], *, fresh: bool) -> None:
        text = json.dumps(dict(run), default=str)
        self.folder = folder / "posteriors" / f"{_checksum([text.encode()]):08x}"
        if fresh:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._write(self.folder / "run.json", run)

    def __contains__(self, name: str) -> bool:
        return self._files(name)[0].exists()

    def load(self, name: str, problem: Problem) -> Fit | None:
        """A finished fit; None without one or, with a message, for damaged files."""
        if name not in self:
            return None
        path, file = self._files(name)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("checksum") != _checksum([file.read_bytes()]):
                raise ValueError("its checksum is wrong")
        except (ValueError, KeyError, OSError) as error:
            logger.warning("%s is fitted again: the finished one is damaged (%s)", name, error)
            return None
        posterior: Any = load_posterior(file, posteriors.get(name).program(problem))
        if isinstance(posterior, Samples):
            posterior = posterior.to(problem.x.device)
        return Fit(posterior=posterior, **content)

    def save(self, fit: Fit) -> None:
        """Keep a finished fit; a message says if the disk does not take it."""
        path, file = self._files(fit.name)
        try:
            path.unlink(missing_ok=True)
            fit.posterior.save(file)
            content = asdict(replace(fit, posterior=None, settings=dict(fit.settings)))
            del content["posterior"]
            self._write(path, content | {"checksum": _checksum([file.read_bytes()])})
        except (OSError, SafetensorError) as error:
            logger.warning("%s could not be kept in %s: %s", fit.name, self.folder, error)

    def load_evaluation(self, name: str, device: torch.device) -> Evaluation | None:
        """The evaluation of a finished fit, if it is there."""
        try:
            return Evaluation.load(self.folder / f"{name}.evaluation").to(device)
        except (ValueError, OSError):
            return None

    def save_evaluation(self, name: str, evaluation: Evaluation) -> None:
        """Keep the evaluation of a finished fit on test data."""
        try:
            evaluation.save(self.folder / f"{name}.evaluation")
        except (OSError, SafetensorError) as error:
            logger.warning("the scores of %s could not be kept: %s", name, error)

    def _write(self, path: Path, content: Mapping[str, Any]) -> None:
        with atomic_write(path) as part:
            part.write_text(json.dumps(dict(content), indent=1, default=str), encoding="utf-8")

    def _files(self, name: str) -> tuple[Path, Path]:
        return self.folder / f"{name}.json", self.folder / f"{name}.safetensors"


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def _checksum(parts: Iterable[bytes]) -> int:
    total = 0
    for part in parts:
        total = zlib.crc32(part, total)
    return total

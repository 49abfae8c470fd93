"""Posteriors kept in a folder as they are finished, from which the same command goes on."""

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pyro_bdl import posteriors
from pyro_bdl._version import __version__
from pyro_bdl.cli.shared import say
from pyro_bdl.data.dataset import Dataset
from pyro_bdl.guides.load import load_posterior
from pyro_bdl.posteriors import Fit, Options, Problem
from pyro_bdl.samples import Samples
from pyro_bdl.utils.files import atomic_write

_FOLDER, _RUN = "posteriors", "run.json"


def identity(data: Dataset, program: Mapping[str, str], settings: Options) -> dict[str, Any]:
    """Data, program and settings that a run must share with the one that it continues.

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


class Kept:
    """The finished fits of one run in the folder ``posteriors`` of another folder.

    A fit is the file of its posterior (``guide.save`` or ``samples.save``) and, written last,
    ``NAME.json`` with its costs and the posterior's checksum. A crash at any moment leaves the
    finished fits; one without ``NAME.json`` counts as not finished.

    :param folder: is made if it does not exist.
    :param run: see ``identity``.
    :raises ValueError: if the folder holds fits of another run; the error names the differences.
    :raises OSError: if the folder cannot be written to.
    """

    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        self.run, self.folder = dict(run), folder / _FOLDER
        path = self.folder / _RUN
        if path.exists():
            self._check(path)
        else:
            _write(path, self.run)

    def part(self, name: str, run: Mapping[str, Any]) -> "Kept":
        """Fits of a part of the run, such as a split of the data, in a folder of their own."""
        return Kept(self.folder / name, run)

    def find(self, name: str, problem: Problem) -> Fit | None:
        """A finished fit; None if there is none, or, with a message, if its files are damaged."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            file = self._posterior(name)
            if told.pop("checksum") != _checksum([file.read_bytes()]):
                raise ValueError("its checksum is wrong")
            model = posteriors.get(name).program(problem)
            posterior: Any = load_posterior(file, model)
            if isinstance(posterior, Samples):
                posterior = posterior.to(problem.x.device)
            return Fit(posterior=posterior, **told)
        except Exception as error:  # any error: the files may be anything
            text = str(error).splitlines() or [""]
            say(f"{name} is fitted again: the kept one is damaged ({type(error).__name__}: "
                f"{text[0]})")  # fmt: skip
            return None

    def keep(self, fit: Fit) -> None:
        """Keep a finished fit; a message says if that fails, for example on a full disk."""
        path, file = self.folder / f"{fit.name}.json", self._posterior(fit.name)
        try:
            path.unlink(missing_ok=True)
            fit.posterior.save(file)
            told = asdict(replace(fit, posterior=None, settings=dict(fit.settings)))
            del told["posterior"]
            _write(path, told | {"checksum": _checksum([file.read_bytes()])})
        except Exception as error:  # the fit itself must not be lost
            say(f"{fit.name} could not be kept in {self.folder}: {error}")

    def _posterior(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _check(self, path: Path) -> None:
        try:
            theirs = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"--resume: '{path}' is damaged ({error}): name another folder, or remove "
                f"'{self.folder}'"
            ) from error
        ours = json.loads(json.dumps(self.run))
        different = [
            f"{name.replace('_', ' ')} is {ours.get(name)} here and was {theirs.get(name)}"
            for name in {**ours, **theirs}
            if ours.get(name) != theirs.get(name)
        ]
        if different:
            raise ValueError(
                f"--resume: '{self.folder}' holds the posteriors of another run: "
                f"{'; '.join(different)}: give the same command, or name another folder"
            )


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_write(path) as part:
        part.write_text(json.dumps(dict(content), indent=1, default=str), encoding="utf-8")


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def _checksum(parts: Iterable[bytes]) -> int:
    total = 0
    for part in parts:
        total = zlib.crc32(part, total)
    return total

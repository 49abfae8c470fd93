"""Chains in a folder: blocks of draws and the state, written as they come.

Each block of draws is a file of its own, and ``state.npz`` names those that count. Files are
written completely or not at all, the state last. A run killed at any moment therefore leaves a
state with all its draws, and a block without a state that names it is ignored. The iterations are
functions of the state, which holds the random keys: a run that goes on makes the same draws.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pyro_bdl.utils.files import atomic_write, require_same

Arrays = dict[str, np.ndarray]


class Restored(NamedTuple):
    """A chain as it was written.

    :param stage: the number of its stage, and ``done`` the iterations made in it.
    :param leaves: the arrays of its state, by path.
    :param blocks: what the stage collected.
    """

    stage: int
    done: int
    leaves: Arrays
    blocks: list[Arrays]


class Journal:
    """One chain, or several in lockstep, in a folder.

    :param settings: numbers and strings by which a folder of another run is recognized.
    :param identity: arrays by which it is too, such as the starts.
    """

    def __init__(
        self, folder: str | Path, settings: Mapping[str, Any], identity: Mapping[str, np.ndarray]
    ) -> None:
        self.folder = Path(folder)
        self.settings, self.identity = json.dumps(settings), dict(identity)
        self.names: list[str] = []
        self.stage = 0

    def restore(self) -> Restored | None:
        """Read the chain; None if the folder holds none.

        :raises ValueError: if it holds chains of another program, data, seed or settings.
        """
        path = self.folder / "state.npz"
        if not path.is_file():
            return None
        with np.load(path, allow_pickle=False) as file:
            held = {name: np.array(file[name]) for name in file.files}
        identity = {
            name.removeprefix("identity/"): value
            for name, value in held.items()
            if name.startswith("identity/")
        }
        require_same(
            f"the checkpoint '{self.folder}'",
            json.loads(str(held["settings"])) | identity,
            json.loads(self.settings) | self.identity,
        )
        self.stage, done = int(held["stage"]), int(held["done"])
        self.names = held["blocks"].tolist()
        blocks = []
        for name in self.names:
            with np.load(self.folder / name, allow_pickle=False) as file:
                blocks.append({key: np.array(file[key]) for key in file.files})
        leaves = {
            name.removeprefix("state/"): value
            for name, value in held.items()
            if name.startswith("state/")
        }
        return Restored(self.stage, done, leaves, blocks)

    def write(self, stage: int, done: int, leaves: Arrays, block: Arrays | None) -> None:
        """Add a block of draws, or none, and replace the state.

        :param done: the iterations of the stage, those of the block included.
        """
        if stage != self.stage:
            self.stage, self.names = stage, []
        if block is not None:
            name = f"draws-{stage}-{done:09d}.npz"
            _save(self.folder / name, block)
            self.names.append(name)
        _save(
            self.folder / "state.npz",
            {f"state/{name}": value for name, value in leaves.items()}
            | {f"identity/{name}": value for name, value in self.identity.items()}
            | {
                "settings": np.array(self.settings),
                "stage": np.array(stage),
                "done": np.array(done),
                "blocks": np.array(self.names, dtype=np.str_),
            },
        )


def _save(path: Path, arrays: Arrays) -> None:
    with atomic_write(path) as part, open(part, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]

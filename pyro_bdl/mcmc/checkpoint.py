"""Chains in a folder: blocks of draws and the state, written as they come.

Each block of draws is a file of its own, and ``state.npz`` names those that count. Files are
written completely or not at all, the state last. A run killed at any moment therefore leaves a
state with all its draws, and a block without a state that names it is ignored. The iterations are
functions of the state, which holds the random keys: a run that goes on makes the same draws.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pyro_bdl.utils.files import atomic_write

Kept = dict[str, np.ndarray]
_SAME = 1e-4  # relative: sums in float32 depend on the number of threads


class Restored(NamedTuple):
    """A chain as it was written.

    :param stage: the number of its stage, and ``done`` the iterations made in it.
    :param leaves: the arrays of its state, by path.
    :param blocks: what the stage collected.
    """

    stage: int
    done: int
    leaves: Kept
    blocks: list[Kept]


class Journal:
    """One chain, or several in lockstep, in a folder.

    :param identity: numbers by which a folder of another run is recognized, such as the starts.
    :param settings: the same as text.
    """

    def __init__(self, folder: str | Path, settings: str, identity: Mapping[str, np.ndarray]):
        self.folder = Path(folder)
        self.settings, self.identity = settings, dict(identity)
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
        self._require_same(held)
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

    def _require_same(self, held: Kept) -> None:
        if str(held["settings"]) != self.settings:
            raise ValueError(
                f"the checkpoint '{self.folder}' is of a call with other settings "
                f"({held['settings']}, now {self.settings}): name another folder, or remove it"
            )
        for name, value in self.identity.items():
            there = held.get(f"identity/{name}")
            if there is None or there.shape != value.shape or not _equal(there, value):
                raise ValueError(
                    f"the checkpoint '{self.folder}' is of another run (its {name} differ): it "
                    "belongs to another program, other data or other starts; name another folder, "
                    "or remove it"
                )

    def write(self, stage: int, done: int, leaves: Kept, block: Kept | None) -> None:
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


def _save(path: Path, arrays: Kept) -> None:
    with atomic_write(path) as part, open(part, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _equal(there: np.ndarray, value: np.ndarray) -> bool:
    scale = float(np.abs(value).max(initial=0.0))
    return bool((np.abs(there - value) <= _SAME * scale).all())

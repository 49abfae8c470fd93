"""Chains in a folder: blocks of draws and the state, written as they come.

Each block of draws is a file of its own, and the state names those that count. Files are written
completely or not at all, the state last. A run killed at any moment therefore leaves a state with
all its draws, and a block without a state that names it is ignored. The iterations are functions of
the state, which holds the random keys: a run that goes on makes the same draws.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pyro_bdl.utils.files import require_same
from pyro_bdl.utils.tensor_file import load_tree, save_tree

STATE = "state.safetensors"
KIND, BLOCK = "state of chains", "block of draws"


class Restored(NamedTuple):
    """A chain as it was written.

    :param stage: the number of its stage, and ``done`` the iterations made in it.
    :param state: what the next iteration needs, a tree.
    :param blocks: what the stage collected, name -> array.
    """

    stage: int
    done: int
    state: Any
    blocks: list[dict[str, Any]]


class Journal:
    """One chain, or several in lockstep, in a folder.

    :param identity: numbers, strings and arrays, such as the starts, by which a folder of another
        run is recognized.
    """

    def __init__(self, folder: str | Path, identity: Mapping[str, Any]) -> None:
        self.folder, self.identity = Path(folder), dict(identity)
        self.names: list[str] = []
        self.stage = 0

    def restore(self) -> Restored | None:
        """Read the chain; None if the folder holds none.

        :raises ValueError: if it holds chains of another program, data, seed or settings.
        """
        if not (self.folder / STATE).is_file():
            return None
        saved = load_tree(self.folder / STATE, kind=KIND)
        require_same(f"the checkpoint '{self.folder}'", saved["identity"], self.identity)
        self.stage, self.names = saved["stage"], saved["blocks"]
        blocks = [load_tree(self.folder / name, kind=BLOCK) for name in self.names]
        return Restored(self.stage, saved["done"], saved["state"], blocks)

    def write(self, stage: int, done: int, state: Any, block: Mapping[str, Any] | None) -> None:
        """Add a block of draws, or none, and replace the state.

        :param done: the iterations of the stage, those of the block included.
        """
        if stage != self.stage:
            self.stage, self.names = stage, []
        if block is not None:
            name = f"draws-{stage}-{done:09d}.safetensors"
            save_tree(self.folder / name, block, kind=BLOCK)
            self.names.append(name)
        saved = {"identity": self.identity, "stage": stage, "done": done, "state": state}
        save_tree(self.folder / STATE, saved | {"blocks": self.names}, kind=KIND)

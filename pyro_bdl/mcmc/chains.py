"""The plan of a run, its draws, progress and warnings, for all samplers, and chains in a folder.

In a folder, blocks of draws and the state are written as they come. Each block of draws is a file
of its own, and the state names those that count. Files are written completely or not at all, the
state last. A run killed at any moment therefore leaves a state with all its draws, and a block
without a state that names it is ignored. The iterations are functions of the state, which holds the
random keys: a run that goes on makes the same draws.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_bdl.errors import warn
from pyro_bdl.utils.files import require_same
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.progress import is_silent
from pyro_bdl.utils.tensor_file import load_tree, save_tree

_ENOUGH = 10  # draws needed to judge chains
_DIVERGENT = 0.1  # the share of microcanonical draws with one above which a warning is given
_BIASED = 10.0  # times the target of the energy variance above which a warning is given
_NEEDLESS = 100.0  # times below it, where one is given too
_SHORTEST = 1e-4  # trajectory length that is not stuck, in standard deviations


class Plan(NamedTuple):
    """The length, number and seed of chains; see ``pyro_bdl.mcmc.sample``."""

    num_warmup: int
    num_samples: int
    seed: int = 0
    chain_method: Literal["parallel", "vectorized"] | None = None
    checkpoint: Path | None = None
    progress: bool | None = None


@dataclass
class Chains:
    """Draws (chains, draws, P) with statistics (chains, draws); fewer than requested after Ctrl-C.

    :param resume: number of draws -> that many more of each chain; None if they cannot go on.
    """

    vectors: Tensor
    stats: dict[str, Tensor]
    interrupted: bool = False
    resume: Callable[[int], "Chains"] | None = None


def progress_bar(progress: bool | None, total: int, description: str) -> tqdm:
    return tqdm(total=total, desc=description, disable=is_silent(progress), leave=False, delay=1)


def stack_chains(chains: list[Chains]) -> Chains:
    """Stack single chains. If some ended early, drop the shortest chains or cut the longest ones,
    whichever keeps more draws; a warning tells of chains that are dropped."""
    longest_first = sorted((chain.vectors.shape[1] for chain in chains), reverse=True)
    draws = max(enumerate(longest_first, 1), key=lambda pair: pair[0] * pair[1])[1]
    kept = [chain for chain in chains if chain.vectors.shape[1] >= draws]
    if len(kept) < len(chains):
        warn(
            f"{len(chains) - len(kept)} of {len(chains)} chains are left out: they ended with at "
            f"most {longest_first[len(kept)]} draws where the others have {draws}",
            "chains-left-out",
        )
    names = kept[0].stats
    return Chains(
        torch.cat([chain.vectors[:, :draws] for chain in kept]),
        {name: torch.cat([chain.stats[name][:, :draws] for chain in kept]) for name in names},
        any(chain.interrupted for chain in chains),
    )


def warn_of_divergences(chains: Chains) -> None:
    """Warn of any divergence of HMC and NUTS, as Stan does; of microcanonical chains, which take a
    step with a large error in parts, if more than a tenth of the draws hold one."""
    if "diverging" not in chains.stats:
        return
    diverging = chains.stats["diverging"].bool()
    count, total = int(diverging.sum()), diverging.numel()
    microcanonical = "energy_variance" in chains.stats
    if not count or (microcanonical and (total < _ENOUGH or count <= _DIVERGENT * total)):
        return
    smaller = "a lower energy_variance" if microcanonical else "a higher target_accept"
    warn(
        f"{count} of {total} draws ended in a divergence: the chains may not reach a part of the "
        "posterior; write hierarchies with standard normal latents (pyro.poutine.reparam with "
        f"LocScaleReparam), then take smaller steps ({smaller}) or priors of scales away from 0",
        "divergences",
    )


def warn_of_energy_variance(chains: Chains, target: float, adapted: bool) -> None:
    """Warn if the energy variance of an unadjusted sampler is far from its target.

    :param adapted: whether the warm-up adapted the step size.
    """
    reached = float(double(chains.stats["energy_variance"]).mean())
    walls = bool(chains.stats["diverging"].any())  # which shorten the step size
    message = f"the energy variance is {reached:.2g}, {reached / target:.2g} times its target "
    if reached > _BIASED * target:
        message += (
            f"{target:.2g}: the step size is too large for a part of the posterior, and the draws "
            "are biased there; take a longer num_warmup, a smaller energy_variance, or "
            "kernel='mams'"
        )
    elif adapted and not walls and reached < target / _NEEDLESS:
        message += (
            f"{target:.2g}: the step size is far smaller than it need be, and the chains are "
            "slow; take a longer num_warmup, or give step_size"
        )
    else:
        return
    warn(message, "energy-variance")


def warn_of_stuck_chains(chains: Chains) -> None:
    """Warn of chains that hardly move: very short trajectories, or every proposal rejected.

    The length of a trajectory is step size times number of steps, in units of the standard
    deviations in the mass matrix. It is about 1 after a good adaptation.
    """
    if chains.vectors.shape[1] < _ENOUGH:
        return
    stats, vectors = chains.stats, chains.vectors
    is_stuck = (vectors == vectors[:, :1]).flatten(1).all(1)
    if {"step_size", "num_steps"} <= stats.keys():
        length = double(stats["step_size"] * stats["num_steps"]).median(1).values
        is_stuck = is_stuck | (length < _SHORTEST).to(is_stuck.device)
    stuck = is_stuck.nonzero().flatten().tolist()
    if not stuck:
        return
    which = ", ".join(map(str, stuck))
    if "step_size" in stats:
        sizes = ", ".join(f"{float(stats['step_size'][i, -1]):.1e}" for i in stuck)
        which += f" (step size {sizes})"
    warn(
        f"of {len(chains.vectors)} chains these hardly moved from their start, and so say nothing "
        f"about the posterior: {which}; start elsewhere (init='uniform', "
        "'network', or a trained guide) or take a longer num_warmup",
        "stuck-chains",
    )


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

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder, self.identity = folder, dict(identity)
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

"""What the backends have in common: the density they sample, settings, draws, progress."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm.auto import tqdm

STATS = ("potential_energy", "energy", "num_steps", "accept_prob", "step_size", "diverging")


@dataclass(frozen=True)
class Settings:
    """How to run HMC or NUTS; see ``pyro_bdl.mcmc.sample``."""

    kernel: str
    num_warmup: int
    num_samples: int
    seed: int
    target_accept: float
    max_tree_depth: int
    trajectory_length: float | None
    dense_mass: bool
    chain_method: str
    progress: bool


@dataclass(frozen=True)
class Target:
    """An unnormalised log density over R^P.

    :param log_density: vector (P,) -> scalar, in nats.
    :param terms: vector -> site -> scalar, to say which site an operator came from.
    """

    log_density: Callable[[Tensor], Tensor]
    terms: Callable[[Tensor], dict[str, Tensor]]


@dataclass
class Chains:
    """Draws (chains, draws, P) with statistics (chains, draws); fewer than asked for where the
    user interrupted."""

    vectors: Tensor
    stats: dict[str, Tensor]
    interrupted: bool = False


def progress_bar(settings: Settings, total: int, description: str) -> tqdm:
    return tqdm(total=total, desc=description, disable=not settings.progress, leave=False)


def stack_chains(chains: list[Chains]) -> Chains:
    """Chains of one draw axis each, cut to the shortest where one was interrupted."""
    draws = min(chain.vectors.shape[1] for chain in chains)
    return Chains(
        torch.cat([chain.vectors[:, :draws] for chain in chains]),
        {
            name: torch.cat([chain.stats[name][:, :draws] for chain in chains])
            for name in chains[0].stats
        },
        any(chain.interrupted for chain in chains),
    )

"""Parts that the backends share: the density they sample, settings, draws, progress."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

STATS = ("potential_energy", "energy", "num_steps", "accept_prob", "step_size", "diverging")


@dataclass(frozen=True)
class Settings:
    """The settings of HMC or NUTS; see ``pyro_bdl.mcmc.sample``."""

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

    def kernel_options(self) -> dict[str, Any]:
        """The options that Pyro's and NumPyro's HMC or NUTS call alike."""
        options: dict[str, Any] = {"target_accept_prob": self.target_accept}
        if self.kernel == "nuts":
            return options | {"max_tree_depth": self.max_tree_depth}
        return options | {"trajectory_length": self.trajectory_length or 2 * math.pi}


@dataclass(frozen=True)
class Target:
    """An unnormalized log density over R^P.

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
    return tqdm(total=total, desc=description, disable=not settings.progress, leave=False, delay=1)


def stack_chains(chains: list[Chains]) -> Chains:
    """Chains of one draw axis each. Where some were interrupted, the shortest are left out or the
    longest cut, whichever keeps more draws."""
    longest_first = sorted((chain.vectors.shape[1] for chain in chains), reverse=True)
    draws = max(enumerate(longest_first, 1), key=lambda pair: pair[0] * pair[1])[1]
    kept = [chain for chain in chains if chain.vectors.shape[1] >= draws]
    return Chains(
        torch.cat([chain.vectors[:, :draws] for chain in kept]),
        {
            name: torch.cat([chain.stats[name][:, :draws] for chain in kept])
            for name in kept[0].stats
        },
        any(chain.interrupted for chain in chains),
    )


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got '{value}'")
    return value


def at_least(name: str, value: int, least: int) -> int:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value

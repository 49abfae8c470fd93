"""Draws and chains that several processes made, brought together."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from pyro_bdl.program.samples import Samples
from pyro_bdl.utils.collectives import Ranks

Draws = TypeVar("Draws", Samples, dict[str, Tensor])


def gather(draws: Draws, *, group: Any = None) -> Draws:
    """The draws of all ranks, on every rank, in the order of the ranks.

    Chains, members of ensembles and predictive draws are independent: each rank makes some::

        chains = bdl.mcmc.sgmcmc(model, (x, y), kernel=kernel, num_chains=2, seed=rank)
        samples = bdl.distributed.gather(chains)  # 2 K chains, each on all of the data

        ensemble = AutoEnsemble(model, size=5)                           # other seeds on each rank
        ...
        draws = bdl.Predictive(model, ensemble, num_samples=5)(x_test)
        draws = bdl.distributed.gather(draws)                            # 5 K draws

    Every rank must call it.

    :param draws: ``Samples``, whose chains are put together, or a dict of tensors (draws, ...), as
        ``Predictive`` returns it. Samples keep the statistics that all ranks have, and the ``info``
        of rank 0; they cannot be extended.
    :param group: a process group; None for all processes.
    :raises ValueError: on all ranks, if the ranks have other sites, shapes or numbers of draws, or
        two ranks have the same draws, as from the same seed.
    :raises RuntimeError: if there are several processes and no process group.
    """
    ranks = Ranks(group)
    if ranks.size == 1:
        return draws
    if not isinstance(draws, Samples):
        _, values = _together(ranks, draws, "draws")
        return cast(Draws, values)
    device = next(iter(draws.latents.values())).device
    parts, latents = _together(ranks, draws.latents, "chains")
    stats = ranks.gather({name: value.cpu() for name, value in draws.stats.items()})
    common = [name for name in stats[0] if all(name in part for part in stats)]
    joint = {name: torch.cat([part[name] for part in stats]).to(device) for name in common}
    info = ranks.gather(dict(draws.info))[0]
    return cast(Draws, Samples(latents, joint, info | {"ranks": len(parts)}))


def _together(
    ranks: Ranks, values: Mapping[str, Tensor], kind: str
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The values of each rank, on the CPU, and all of them one after another."""
    parts = ranks.gather({name: value.detach().cpu() for name, value in values.items()})
    kinds = [{name: tuple(value.shape[1:]) for name, value in part.items()} for part in parts]
    for rank, shapes in enumerate(kinds):
        if shapes != kinds[0]:
            raise ValueError(
                f"rank {rank} has {kind} of shapes {shapes} and rank 0 of {kinds[0]}: make them "
                "by the same program, with the same number of draws"
            )
    for one, other in combinations(range(len(parts)), 2):
        if all(torch.equal(parts[one][name], parts[other][name]) for name in parts[one]):
            raise ValueError(
                f"rank {other} has the same {kind} as rank {one}: give each rank a seed of its own"
            )
    joint = {
        name: torch.cat([part[name] for part in parts]).to(value.device)
        for name, value in values.items()
    }
    return parts, joint
